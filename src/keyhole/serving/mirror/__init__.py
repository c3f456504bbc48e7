"""Rounds copied to object stores and back."""
