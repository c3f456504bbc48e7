"""Oblivious HTTP: who asks and what is asked are known to different parties.

`binary_http.py`, `key_config.py` and `ohttp.py` are RFC 9292 and RFC 9458; `blind_select.py` is the
client that asks for slices, `relay.py` and `gateway.py` are the two parties it asks through.
"""
