"""Reads known files, one module for each format; all yield clients of one shape."""
