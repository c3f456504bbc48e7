"""Runs the experiments of the paper: tasks, arms, sweeps."""
