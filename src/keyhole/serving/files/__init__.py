"""Rounds as files: written whole, mapped, kept, retired; and updates as files."""
