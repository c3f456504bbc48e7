"""What `benchmarks/slices.py` measures against, and the load it puts on all of them."""
