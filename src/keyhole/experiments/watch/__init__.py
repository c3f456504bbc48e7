"""A page on which runs and rounds can be watched."""
