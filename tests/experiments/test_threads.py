"""Every task trains the same bytes with any number of threads."""

import os
import subprocess
import sys

import pytest

from keyhole.experiments.specs import DEFAULTS
from tests.helpers import ROOT

RUN = """
import hashlib
import sys

import numpy as np

from keyhole import tree
from keyhole.experiments.experiment import Experiment
from keyhole.experiments.opening import open_data
from keyhole.experiments.specs import spec_of
from keyhole.rounds.cores import Cores, use_one_thread

use_one_thread()
spec = spec_of(sys.argv[1], {"cohort.size": 5, "rounds": 2})
experiment = Experiment(spec, open_data(spec))
for cores in (1, 2, 5):
    run = experiment.start(0, None)
    list(run.rounds(2, execute=Cores(cores)))
    digest = hashlib.sha256()
    for leaf in tree.flatten(run.state.model()).values():
        digest.update(np.ascontiguousarray(leaf))
    print(digest.hexdigest())
"""


@pytest.mark.slow
@pytest.mark.parametrize("task", DEFAULTS)
def test_any_number_of_threads_trains_the_same_bytes(task):
    done = subprocess.run(
        [sys.executable, "-c", RUN, task],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        timeout=600,
    )
    found = done.stdout.split()
    assert len(found) == 3
    assert len(set(found)) == 1
