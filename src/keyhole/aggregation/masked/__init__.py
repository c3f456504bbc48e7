"""Masked sums at one server: it learns what updates add up to, and no single one."""
