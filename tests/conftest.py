"""Strict settings for every test: no silent promotion in JAX, the same examples on every run,
children that can be interrupted, and modules and programs of JAX that are compiled once."""

import gc
import os
import signal
import sys
import tempfile

os.environ.setdefault("JAX_NUMPY_RANK_PROMOTION", "raise")
os.environ.setdefault("JAX_NUMPY_DTYPE_PROMOTION", "strict")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

# A shell starts what runs in the background with SIGINT ignored, and children inherit that. A
# signal that is handled here is at its default in every program that a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest
from _pytest.doctest import DoctestModule
from hypothesis import HealthCheck, Phase, settings

# Children import JAX some hundred times: 3 s each where Python may not keep compiled modules.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

settings.register_profile(
    "all",
    max_examples=60,
    deadline=None,
    derandomize=True,
    phases=(Phase.explicit, Phase.generate, Phase.shrink),
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("fast", settings.get_profile("all"), max_examples=20)


def pytest_configure(config):
    """Laws meet 20 examples each; with the slow tests 60. Devices keep no ledger of this user's."""
    folder = tempfile.TemporaryDirectory(prefix="keyhole-state-")
    config.add_cleanup(folder.cleanup)
    os.environ["XDG_STATE_HOME"] = folder.name
    gc.disable()  # what is imported and collected stays: nothing to look for until the tests begin
    settings.load_profile("fast" if config.option.markexpr == "not slow" else "all")


@pytest.hookimpl(wrapper=True)
def pytest_collect_file():
    """Looks for examples in docstrings of the library alone: files of tests have none."""
    found = yield
    return [each for each in found if not isinstance(each, DoctestModule)]


# Tests that start processes come first, so that no worker of xdist is left with them at the end.
LONGEST = ("tests/engines/", "tests/examples/", "tests/service/", "tests/cli/", "tests/rounds/")


def pytest_collection_modifyitems(items):
    def place(item):
        starts = [item.nodeid.startswith(folder) for folder in LONGEST]
        return starts.index(True) if any(starts) else len(starts)

    items.sort(key=place)


def pytest_xdist_make_scheduler(config, log):
    """A worker takes whole files, in the order above, and one of them takes all tests of engines:
    Ray and Flower start clusters of processes, and two at a time are slower than one."""
    from xdist.scheduler import LoadFileScheduling

    class ByFile(LoadFileScheduling):
        def _split_scope(self, nodeid):
            file = super()._split_scope(nodeid)
            return LONGEST[0] if file.startswith(LONGEST[0]) else file

    config.option.loadscopereorder = False
    return ByFile(config, log)


def pytest_collection_finish(session):
    """Keeps what JAX compiles for the rest of this process: most tests of tasks make new functions
    of the same programs. Other processes do not see it, their threads may be other ones."""
    gc.freeze()
    gc.enable()
    if "jax" not in sys.modules:
        return
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    folder = tempfile.TemporaryDirectory(prefix="keyhole-compiled-")
    session.config.add_cleanup(folder.cleanup)
    jax.config.update("jax_compilation_cache_dir", folder.name)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    compilation_cache.reset_cache()
