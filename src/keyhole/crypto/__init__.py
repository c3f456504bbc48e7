"""Provides cryptography that names no delivery and no aggregation."""
