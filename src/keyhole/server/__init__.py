"""Holds the server's model at memory speed: rows by key, optimizers, state that lasts."""
