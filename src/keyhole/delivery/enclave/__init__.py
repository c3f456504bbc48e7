"""Enclaves: slices from a program that shows what it is before it is told a key."""
