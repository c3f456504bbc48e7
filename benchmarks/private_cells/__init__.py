"""The parts of `private_select.py`, one for each thing that is measured."""
