"""What a run tells its devices in the manifest of a round."""

from __future__ import annotations

from keyhole.training.plan import Plan

__all__ = ["round_settings"]


def round_settings(t: int, plan: Plan) -> dict[str, object]:
    """The settings of round t, with which devices choose and train as clients in process do;
    `RunSettings` of `device/population.py` reads them."""
    return {
        "round": t,
        "seed": plan.seed,
        "trial": plan.trial,
        "keys_per_client": dict(plan.keys_per_client),
        "shared_keys": plan.shared_keys,
    }
