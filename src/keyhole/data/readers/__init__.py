"""Readers, one file for each format; all yield clients of one shape."""
