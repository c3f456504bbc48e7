"""Algorithms 1 and 2 of the paper, and the simulator that runs them."""

from keyhole.training.algorithms import train, train_with_select
from keyhole.training.randomness import generator

__all__ = ["generator", "train", "train_with_select"]
