"""Slices computed when they are first asked for, each once."""
