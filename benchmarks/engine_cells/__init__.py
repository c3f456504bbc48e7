"""The parts of `engines.py`, one for each thing that is measured."""
