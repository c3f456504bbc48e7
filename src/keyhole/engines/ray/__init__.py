"""Trains cohorts in Ray workers all over a cluster, with the bytes of one process."""
