"""Runs the `keyhole` command, one module for each verb."""
