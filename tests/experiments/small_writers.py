"""Writers so few that a process reads them at once, and a metric that ends its process."""

import os

from keyhole.data.open import make_synthetic


def make(seed):
    return make_synthetic("writers", seed, writers=6)


def die(state):
    os._exit(1)
