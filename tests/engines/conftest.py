"""One Ray for all tests of engines: starting it takes longer than most of them. It ends with the
last of them, since its processes are never quite idle."""

import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

HERE = Path(__file__).parent
OPENED = ExitStack()


@pytest.fixture(scope="module")
def own_ray():
    """A Ray on this machine, on two CPUs; engines that are opened meanwhile join it."""
    from keyhole.engines.ray.crew import connected, find_ray

    ray = find_ray() if "ray" in sys.modules else None
    if ray is None or not ray.is_initialized():  # the first, or a cluster had its place
        ray = OPENED.enter_context(connected(cpus=2))
    return ray


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(nextitem):
    if nextitem is None or not nextitem.path.is_relative_to(HERE):
        OPENED.close()
