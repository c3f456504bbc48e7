"""Names algorithms: a client update and a server optimizer that belong together; and reads how
single parameters are stepped at the server.

Reddi et al., Adaptive Federated Optimization (2021), for the adaptive ones; Li et al., Federated
Optimization in Heterogeneous Networks (2020), for FedProx.

The text of `RunSpec.server.parameters` has groups between blanks: a pattern of paths, `=`, and
settings between commas, of which the first may be the name of an optimizer:

    "items.*=adam,lr=0.01,warmup=100 out.bias=lr=0.1"

What is not said is as the run has it. The first pattern that names a parameter counts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

from keyhole.errors import InputError
from keyhole.models.client_update import ClientUpdate
from keyhole.parts import near_miss
from keyhole.primitives.layout import Layout
from keyhole.rounds.spec import ServerSpec
from keyhole.server.groups import ByParameter, Schedule, Scheduled
from keyhole.server.optimizers import SGD, Adagrad, Adam, Momentum, Optimizer, WithAdded, Yogi


@dataclass(frozen=True)
class Algorithm:
    """How clients train and how the server steps."""

    client: ClientUpdate
    server: Optimizer


ALGORITHMS: dict[str, Callable[[float, float], Optimizer]] = {
    "FedAvg": lambda lr, _: SGD(lr),
    "FedProx": lambda lr, _: SGD(lr),
    "FedAdagrad": lambda lr, eps: Adagrad(lr, eps=eps),
    "FedAdam": lambda lr, eps: Adam(lr, b1=0.9, b2=0.99, eps=eps),
    "FedYogi": lambda lr, eps: Yogi(lr, b1=0.9, b2=0.99, eps=eps),
}
"""Name -> the server's optimizer for a learning rate and eps; betas are those of Reddi et al.
Clients run SGD; those of FedProx are pulled back to where they started."""

_NAMES = {"sgd": "FedAvg", "adagrad": "FedAdagrad", "adam": "FedAdam", "yogi": "FedYogi"}
_MOMENTUM = "momentum"
_OF_SCHEDULE = {"warmup": int, "decay": str, "over": int}


def algorithm_named(
    name: str,
    client_lr: float,
    server_lr: float = 1.0,
    *,
    eps: float = 1e-3,
    proximal: float = 0.01,
    **client: Any,
) -> Algorithm:
    """Returns the algorithm of that name.

    Args:
        name: a key of `ALGORITHMS`, in any case.
        server_lr: with 1, FedAvg averages models.
        eps: of adaptive optimizers; others do without.
        proximal: of FedProx; others do without.
        client: what else `ClientUpdate` takes.

    >>> algorithm_named("FedAvg", client_lr=0.1).server
    SGD(lr=1.0)
    """
    by_case = {known.lower(): known for known in ALGORITHMS}
    known = by_case.get(name.lower())
    if known is None:
        raise InputError(
            f"no such algorithm: got {name}; expected {', '.join(ALGORITHMS)}; choose one of them"
        )
    pull = proximal if known == "FedProx" else 0.0
    update = ClientUpdate(client_lr, proximal=pull, **client)
    return Algorithm(update, ALGORITHMS[known](server_lr, eps))


def with_added(optimizer: Optimizer, model: Any) -> Optimizer:
    """Returns the optimizer, which leaves out what a model declares as `added`."""
    paths = [field.path for part in model.layout.parts for field in part.fields]
    found = WithAdded(optimizer, tuple(getattr(model, "added", ())))
    for each in found.added:
        if not any(WithAdded(optimizer, (each,)).is_added(path) for path in paths):
            raise InputError(
                f"the model has no parameter {each!r} to add updates to: got it in `added`; "
                f"expected some of {', '.join(paths)}; {near_miss(each, paths)}"
            )
    return found if found.added else optimizer


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
