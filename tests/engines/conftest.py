"""One Ray for all tests of engines, and one engine on it: starting them takes longer than most of
the tests. They end with the last of these, since Ray's processes are never quite idle."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.engines import crowd
from tests.engines.ray.clusters import OPENED

HERE = Path(__file__).parent
ENGINES = {}


@pytest.fixture(scope="module")
def own_ray():
    """A Ray on this machine, on two CPUs; engines that are opened meanwhile join it."""
    from keyhole.engines.ray.crew import connected, find_ray

    ray = find_ray() if "ray" in sys.modules else None
    if ray is None or not ray.is_initialized():  # the first, or a cluster had its place
        ray = OPENED.enter_context(connected(cpus=2))
    return ray


@pytest.fixture(scope="module")
def crowd_on_ray(own_ray, tmp_path_factory):
    """The crowd on two workers: the `engine`, and the file `broken`, while which is there every
    client fails."""
    from keyhole.engines.ray.engine import RayEngine

    if not ENGINES:
        broken = tmp_path_factory.mktemp("crowd") / "broken"
        factory = crowd.BreakableCrowd(str(broken))
        engine = OPENED.enter_context(RayEngine(factory, 2))
        ENGINES["crowd"] = SimpleNamespace(engine=engine, broken=broken)
        OPENED.callback(ENGINES.clear)
    return ENGINES["crowd"]


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(nextitem):
    if nextitem is None or not nextitem.path.is_relative_to(HERE):
        OPENED.close()
