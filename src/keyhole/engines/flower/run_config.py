"""What a run's config says of its rounds: `[tool.flwr.app.config]` of the app's pyproject.toml.

    run = "/srv/keyhole/run"         where the server keeps the run: the same run config goes on
    rounds-directory = "..."         what `keyhole serve` serves
    service = "https://..."          the slice service, as devices reach it
    token-key = "/srv/keys"          signing keys of the service; leave out if it has none
    round-seconds = 300.0            a round closes after so long with what has arrived
    over-selection = 1.3             how many times more clients are called than are waited for
    least-updates = 1                with fewer, a round makes no step
    least-nodes = 1                  a round waits for so many nodes,
    node-seconds = 120.0             for so long
    delivery = "clear"               or "pir": slices from two servers that do not collude
    second = "https://..."           the second of them
    aggregators = "URL URL"          two aggregators that do not collude add up updates in secret
    aggregator-tokens = "FILE FILE"  tokens of the trainer there, from their operators
    aggregator-ca = "/etc/ca.pem"    authorities to trust for them

Paths are those of the machine that the ServerApp runs on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from keyhole.engines.flower.ways import DELIVERIES
from keyhole.errors import InputError

__all__ = ["RoundsConfig"]

_NUMBERS = {
    "round-seconds": (300.0, 0.0),
    "over-selection": (1.3, 1.0),
    "least-updates": (1, 1),
    "least-nodes": (1, 1),
    "node-seconds": (120.0, 0.0),
}
"""Name -> what it is by default, and the least that it may be; seconds are above."""


@dataclass(frozen=True)
class RoundsConfig:
    """How the rounds of a run are made, as the module describes it.

    Args:
        run: directory of the run.
        rounds: directory that the slice service serves.
        service: its URL.
        token_key: file of its signing keys.
        round_seconds: deadline of a round.
        over_selection: how many times more clients are called than are waited for.
        least_updates: with fewer, a round makes no step.
        least_nodes: that a round waits for.
        node_seconds: for how long.
        delivery: how slices are fetched.
        second: URL of the second slice server.
        aggregators: URLs of the two aggregators.
        aggregator_tokens: files of the trainer's tokens there.
        aggregator_ca: PEM file of the authorities to trust for them.
    """

    run: Path
    rounds: Path
    service: str
    token_key: Path | None = None
    round_seconds: float = 300.0
    over_selection: float = 1.3
    least_updates: int = 1
    least_nodes: int = 1
    node_seconds: float = 120.0
    delivery: str = "clear"
    second: str = ""
    aggregators: tuple[str, ...] = ()
    aggregator_tokens: tuple[Path, ...] = ()
    aggregator_ca: Path | None = None

    @staticmethod
    def of(config: Mapping[str, Any]) -> RoundsConfig:
        """Reads `Context.run_config`; names that are not ours are left to others.

        Raises:
            InputError: a value is missing or cannot be used.
        """
        run, rounds, service = (_text(config, n) for n in ("run", "rounds-directory", "service"))
        delivery, second = config.get("delivery", "clear"), str(config.get("second", ""))
        if delivery not in DELIVERIES:
            raise _bad("delivery", repr(delivery), ", ".join(DELIVERIES))
        if (delivery == "pir") != bool(second):
            raise _bad("second", repr(second), "a URL with delivery pir, and none without")
        aggregators, tokens = (
            tuple(str(config.get(name, "")).split())
            for name in ("aggregators", "aggregator-tokens")
        )
        if len(aggregators) not in (0, 2) or len(tokens) != len(aggregators):
            got = f"{len(aggregators)} URLs and {len(tokens)} files of tokens"
            raise _bad("aggregators", got, "two of each, with a space between, or none")
        keys, ca = str(config.get("token-key", "")), str(config.get("aggregator-ca", ""))
        numbers = {name: _number(config, name) for name in _NUMBERS}
        return RoundsConfig(
            run=Path(run),
            rounds=Path(rounds),
            service=service,
            token_key=Path(keys) if keys else None,
            delivery=delivery,
            second=second,
            aggregators=aggregators,
            aggregator_tokens=tuple(map(Path, tokens)),
            aggregator_ca=Path(ca) if ca else None,
            **{name.replace("-", "_"): value for name, value in numbers.items()},  # type: ignore[arg-type]
        )


def _text(config: Mapping[str, Any], name: str) -> str:
    value = config.get(name, "")
    if not isinstance(value, str) or not value:
        raise _bad(name, repr(value), "a text")
    return value


def _number(config: Mapping[str, Any], name: str) -> float:
    usual, least = _NUMBERS[name]
    value = config.get(name, usual)
    kind = int if isinstance(usual, int) else int | float
    is_number = isinstance(value, kind) and not isinstance(value, bool)
    is_inside = is_number and least <= value < inf and (value > 0)
    if not is_inside:
        what = "a whole number" if isinstance(usual, int) else "a finite number"
        raise _bad(name, repr(value), f"{what} {f'from {least:g}' if least else 'above 0'}")
    return value if isinstance(usual, int) else float(value)


def _bad(name: str, got: str, allowed: str) -> InputError:
    return InputError(
        f"the run config has no {name} that can be used",
        got=got,
        allowed=allowed,
        fix="set it in pyproject.toml of the app, or with `flwr run -c`",
    )
