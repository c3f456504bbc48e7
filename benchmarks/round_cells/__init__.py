"""The parts of `internet_scale.py`: what a request costs, and a round in simulated time."""
