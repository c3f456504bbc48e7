"""Private information retrieval: slices reach a client, and no server learns which.

`terms.py` has what both sides agree on, `retrieval.py` what every scheme offers, `messages.py` what
travels. `two_server.py` is the default, `one_server.py` for those who cannot have two servers,
`chor.py` the plain baseline.
"""
