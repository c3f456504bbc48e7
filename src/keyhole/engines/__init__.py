"""Runs cohorts beyond this process: on Ray workers, or on devices that Flower calls."""
