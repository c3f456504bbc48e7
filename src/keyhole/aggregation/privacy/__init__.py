"""Differential privacy: what a released model may tell about one client, and what it has told."""
