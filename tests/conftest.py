"""Strict settings for every test: no silent promotion in JAX, the same examples on every run."""

import os

os.environ.setdefault("JAX_NUMPY_RANK_PROMOTION", "raise")
os.environ.setdefault("JAX_NUMPY_DTYPE_PROMOTION", "strict")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

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
