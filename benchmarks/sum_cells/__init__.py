"""The parts of `secure_sum.py`, one for each thing that is measured."""
