"""Sums at two servers: each holds a share of the sum, and neither an update."""
