"""One Ray for all tests of engines: starting it takes longer than most of them."""

import sys
from contextlib import ExitStack

import pytest


@pytest.fixture(scope="session")
def opened():
    """What lasts until the last test."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture(scope="module")
def own_ray(opened):
    """A Ray on this machine, on two CPUs; engines that are opened meanwhile join it."""
    from keyhole.engines.ray.crew import connected, find_ray

    ray = find_ray() if "ray" in sys.modules else None
    if ray is None or not ray.is_initialized():  # the first, or a cluster had its place
        ray = opened.enter_context(connected(cpus=2))
    return ray
