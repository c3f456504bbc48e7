"""What the server holds and does at memory speed: rows by key, sub-models, state that survives."""
