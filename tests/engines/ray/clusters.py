"""Clusters of several Ray nodes on this machine, for tests."""

import os
import warnings
from contextlib import ExitStack, contextmanager

from keyhole.engines.ray.crew import find_ray

OPENED = ExitStack()  # the Ray that tests of this process share, and what runs on it


@contextmanager
def cluster_of(nodes, first_cpus=1):
    """A cluster of so many nodes with a CPU each; the first is the one that a driver joins."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    ray = find_ray()
    from ray.cluster_utils import Cluster

    OPENED.close()  # the tests of the shared Ray are over, or start it again
    cluster = Cluster()
    try:
        with warnings.catch_warnings():  # as the engine does where it starts Ray
            warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
            for cpus in (first_cpus, *[1] * (nodes - 1)):
                settings = {"include_dashboard": False, "object_store_memory": 1 << 28}
                cluster.add_node(num_cpus=cpus, **settings)
            cluster.wait_for_nodes()
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()
