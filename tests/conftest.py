"""Strict settings for every test: no silent promotion in JAX, the same examples on every run,
children that can be interrupted."""

import os
import signal

os.environ.setdefault("JAX_NUMPY_RANK_PROMOTION", "raise")
os.environ.setdefault("JAX_NUMPY_DTYPE_PROMOTION", "strict")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

# A shell starts what runs in the background with SIGINT ignored, and children inherit that. A
# signal that is handled here is at its default in every program that a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

from hypothesis import HealthCheck, Phase, settings

settings.register_profile(
    "laws",
    max_examples=60,
    deadline=None,
    derandomize=True,
    phases=(Phase.explicit, Phase.generate, Phase.shrink),
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("laws")
