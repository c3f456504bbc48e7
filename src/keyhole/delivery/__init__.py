"""How slices travel from the server to the clients of a round, in process, and what it costs."""
