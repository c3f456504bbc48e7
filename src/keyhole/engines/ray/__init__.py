"""Cohorts on Ray: clients train in workers all over a cluster, with the bytes of one process."""
