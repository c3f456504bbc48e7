"""How a client chooses its keys."""
