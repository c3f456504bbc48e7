"""Private information retrieval: slices reach a client, and no server learns which."""
