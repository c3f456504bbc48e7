"""Reads how single parameters are stepped at the server: the text of `RunSpec.server.parameters`.

Groups stand between blanks: a pattern of paths, `=`, and settings between commas, of which the
first may be the name of an optimizer:

    "items.*=adam,lr=0.01,warmup=100 out.bias=lr=0.1"

What is not said is as the run has it. The first pattern that names a parameter counts.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from keyhole.errors import InputError
from keyhole.parts import near_miss
from keyhole.primitives.layout import Layout
from keyhole.rounds.algorithms import ALGORITHMS
from keyhole.rounds.spec import ServerSpec
from keyhole.server.groups import ByParameter, Schedule, Scheduled
from keyhole.server.optimizers import Momentum, Optimizer

_NAMES = {"sgd": "FedAvg", "adagrad": "FedAdagrad", "adam": "FedAdam", "yogi": "FedYogi"}
_MOMENTUM = "momentum"
_OF_SCHEDULE = {"warmup": int, "decay": str, "over": int}


def with_groups(server: ServerSpec, rest: Optimizer, layout: Layout) -> Optimizer:
    """Returns the optimizer with which some parameters are stepped in ways of their own.

    Args:
        server: what the run says; its rate and eps are those of groups that do not say theirs.
        rest: steps all other parameters.

    Raises:
        InputError: the text cannot be read, a setting is not one of its optimizer, or a pattern
            names no parameter.

    >>> import numpy as np
    >>> from keyhole.server.optimizers import SGD
    >>> layout = Layout.of({"a": np.zeros(2, np.float32), "b": np.zeros(3, np.float32)})
    >>> with_groups(ServerSpec(lr=1.0, parameters="b=momentum,beta=0.5"), SGD(1.0), layout).groups
    (('b', Momentum(lr=1.0, beta=0.5, nesterov=False)),)
    """
    groups = server.parameters.split()
    if not groups:
        return rest
    found = ByParameter(tuple(_group(each, rest, server.lr, server.eps) for each in groups), rest)
    found.check([field.path for part in layout.parts for field in part.fields])
    return found


def _group(text: str, rest: Optimizer, lr: float, eps: float) -> tuple[str, Optimizer]:
    pattern, sign, told = text.partition("=")
    words = told.split(",") if told else []
    if not (pattern and sign and words):
        raise InputError(
            f"a group of parameters cannot be read: got {text!r}; expected "
            "PATTERN=OPTIMIZER,SETTING=VALUE, such as items.*=adam,lr=0.01; write it so"
        )
    name = None if "=" in words[0] else words.pop(0)
    given = dict(_setting(word, pattern) for word in words)
    schedule = Schedule(**{n: given.pop(n) for n in _OF_SCHEDULE if n in given})
    made = _with(rest if name is None else _named(name, lr, eps), given, pattern)
    return pattern, made if schedule == Schedule() else Scheduled(made, schedule)  # type: ignore[arg-type]


def _setting(word: str, pattern: str) -> tuple[str, Any]:
    name, _, value = word.partition("=")
    try:
        return name, _OF_SCHEDULE.get(name, float)(value)
    except ValueError:
        raise InputError(
            f"a setting of the parameters {pattern!r} cannot be read: got {word!r}; expected "
            "NAME=NUMBER; write it so"
        ) from None


def _named(name: str, lr: float, eps: float) -> Optimizer:
    if name == _MOMENTUM:
        return Momentum(lr)
    if name not in _NAMES:
        known = (*_NAMES, _MOMENTUM)
        raise InputError(
            f"no such optimizer for a group of parameters: got {name!r}; expected "
            f"{', '.join(known)}; {near_miss(name, known)}"
        )
    return ALGORITHMS[_NAMES[name]](lr, eps)


def _with(optimizer: Optimizer, given: dict[str, Any], pattern: str) -> Optimizer:
    """The optimizer with settings; `nesterov` is a number here, as all others."""
    known = [f.name for f in fields(optimizer) if f.init]  # type: ignore[arg-type]
    for name in given:
        if name not in known:
            raise InputError(
                f"{type(optimizer).__name__} has no setting of that name for the parameters "
                f"{pattern!r}: got {name!r}; expected {', '.join([*known, *_OF_SCHEDULE])}; "
                f"{near_miss(name, known)}"
            )
    changed: Optimizer = replace(optimizer, **given)  # type: ignore[type-var]
    return changed
