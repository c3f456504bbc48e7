"""A project: one file for a run and its parties, their start-up kits, and a try-out of them all."""
