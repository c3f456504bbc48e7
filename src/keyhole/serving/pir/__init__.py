"""Private retrieval over the slice service: no server learns which slices a device fetches.

`routes.py` answers at a service, from the databases of `databases.py`, in passes of `passes.py`;
`pir_fetch.py` asks on a device. What a scheme is made of is in `keyhole.private.pir`.
"""
