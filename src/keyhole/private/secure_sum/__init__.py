"""Secure sums: the server learns what updates add up to, and neither their keys nor any one."""
