"""Runs Algorithms 1 and 2: rounds, asynchronous rounds, and the loop that resumes."""
