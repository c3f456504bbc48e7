"""Prices every delivery and aggregation from public numbers, and says which to use."""
