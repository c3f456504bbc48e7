"""Draws figures and tables from the records of runs, beside the paper's numbers."""
