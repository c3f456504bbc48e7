"""Steps the touched rows as a dense optimizer would step all: SGD, Adagrad, Adam.

A dense optimizer moves every row in every step: where the gradient is zero, momentum still decays
and still moves the value. Here a row remembers the step it is current at. When it is next touched
or read, the steps that it missed are made up for, so that values equal optax's (0.2) with zero
gradients on untouched rows, to float32 rounding. Missed steps cost nothing until then, and reading
writes nothing.

Gradients are updates: start minus end, so a step subtracts. A slab holds rows, their optimizer
state, and the step that each row is current at.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cache
from math import prod
from types import ModuleType
from typing import Any, ClassVar, Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from keyhole.arrays import Array, KeyArray
from keyhole.errors import InputError
from keyhole.identity import identity_of
from keyhole.primitives.layout import Part
from keyhole.server.steps import Decay, decay_of, moments_horizon, momentum_horizon, momentum_sums


@dataclass
class Slab:
    """Rows side by side in anonymous memory; the last dimension is one row.

    Args:
        values: (capacity, width) float32.
        moments: as many arrays of that shape as the optimizer keeps, none to two.
        last: (capacity,) int32; the step a row is current at, 0 for one that was never touched.
    """

    values: NDArray[np.float32]
    moments: tuple[NDArray[np.float32], ...]
    last: NDArray[np.int32]

    @staticmethod
    def empty(capacity: int, width: int, moments: int) -> Slab:
        """Memory that is not filled: pages cost nothing until they are written."""
        shape = (capacity, width)
        states = tuple(np.empty(shape, np.float32) for _ in range(moments))
        return Slab(np.empty(shape, np.float32), states, np.empty(capacity, np.int32))

    @property
    def first(self) -> NDArray[np.float32]:
        """The first state array; the values stand in where there is none and are not read as
        such."""
        return self.moments[0] if self.moments else self.values

    @property
    def arrays(
        self,
    ) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32], NDArray[np.int32]]:
        """Values, first and second moments, last: what a kernel takes."""
        second = self.moments[1] if len(self.moments) > 1 else self.first
        return self.values, self.first, second, self.last

    @property
    def nbytes(self) -> int:
        """The size of all arrays; pages that were never written take no memory."""
        return self.values.nbytes + sum(m.nbytes for m in self.moments) + self.last.nbytes

    def grown(self, capacity: int, count: int) -> Slab:
        """Returns a larger slab with the first `count` rows copied."""
        larger = Slab.empty(capacity, self.values.shape[1], len(self.moments))
        for old, new in zip(self.named().values(), larger.named().values(), strict=True):
            new[:count] = old[:count]
        return larger

    def named(self) -> dict[str, NDArray[np.float32] | NDArray[np.int32]]:
        """Returns the arrays by name, in a fixed order: what a snapshot stores."""
        moments = {f"moment{i}": moment for i, moment in enumerate(self.moments)}
        return {"values": self.values, **moments, "last": self.last}


Span: TypeAlias = Callable[[int, int], None]
"""Work on touched rows start..stop; spans may run in any order and in any thread."""


class Optimizer(Protocol):
    """What a table asks of an optimizer.

    `initial_moments` are the values that each number's state starts with. `horizon` is how many
    steps a row goes on moving after it was touched. `moves_all` says that rows which nobody ever
    touched move too.
    """

    @property
    def initial_moments(self) -> tuple[Any, ...]:
        """The start of each state array, none to two of them: a number, or one for each column."""
        ...

    @property
    def horizon(self) -> int:
        """Steps after which a row that is not touched stays where it is."""
        ...

    @property
    def moves_all(self) -> bool:
        """Whether rows that were never touched move."""
        ...

    def step(self, slab: Slab, slots: KeyArray, rows: Array, now: int) -> Span:
        """Returns the work of step `now` (the first is 1) on the rows at `slots`."""
        ...

    def read(self, slab: Slab, slots: KeyArray, out: Array, now: int) -> Span:
        """Returns the work of writing the values after step `now` to `out`; slot -1 is passed
        over."""
        ...


@cache
def compiled_steps() -> ModuleType:
    """Returns the compiled steps: a device that describes an optimizer needs no numba."""
    from keyhole.server import step_loops

    return step_loops


def _read_values(_: SGD | Adagrad, slab: Slab, slots: KeyArray, out: Array, now: int) -> Span:
    """Implements `Optimizer.read` where values are current."""
    return lambda start, stop: compiled_steps().copy(slab.values, slots, out, start, stop)


@dataclass(frozen=True)
class SGD:
    """Gradient descent: x - eta u; `optax.sgd(lr)`.

    Args:
        lr: eta, above 0.

    Raises:
        InputError: a setting is outside its range.
    """

    lr: float
    initial_moments = ()
    horizon = 0
    moves_all = False

    def __post_init__(self) -> None:
        _check_range("lr", self.lr)

    def step(self, slab: Slab, slots: KeyArray, rows: Array, now: int) -> Span:
        """Implements `Optimizer.step`."""
        lr = np.float32(self.lr)
        return lambda start, stop: compiled_steps().sgd(
            slab.values, slab.last, slots, rows, now, lr, start, stop
        )

    read = _read_values


@dataclass(frozen=True)
class Adagrad:
    """Steps shrink with the squares seen: a + u^2, x - eta u / sqrt(a + eps); `optax.adagrad`.

    Args:
        lr: eta, above 0.
        eps: above 0, inside the root.
        initial: what a starts with, 0 or more.

    Raises:
        InputError: a setting is outside its range.

    Reference: Duchi et al. 2011; FedAdagrad in Reddi et al. 2021.
    """

    lr: float
    eps: float = 1e-7
    initial: float = 0.1
    horizon = 0
    moves_all = False

    def __post_init__(self) -> None:
        _check_range("lr", self.lr)
        _check_range("eps", self.eps)
        _check_range("initial", self.initial, zero=True)

    @property
    def initial_moments(self) -> tuple[float, ...]:
        """Implements `Optimizer.initial_moments`."""
        return (self.initial,)

    def step(self, slab: Slab, slots: KeyArray, rows: Array, now: int) -> Span:
        """Implements `Optimizer.step`."""
        settings = np.float32(self.lr), np.float32(self.eps)
        return lambda start, stop: compiled_steps().adagrad(
            slab.values, slab.first, slab.last, slots, rows, now, *settings, start, stop
        )

    read = _read_values


@dataclass(frozen=True)
class Momentum:
    """Heavy ball: m = u + beta m, x - eta m; with `nesterov`, x - eta (u + beta m).

    `optax.sgd(lr, momentum=beta, nesterov=nesterov)`. Missed steps have a closed form: after g of
    them m is beta^g m and x has moved by eta m (beta + ... + beta^g), times beta with `nesterov`.

    Args:
        lr: eta, above 0.
        beta: in [0, 1).
    """

    lr: float
    beta: float = 0.9
    nesterov: bool = False
    initial_moments = (0.0,)
    moves_all = False

    def __post_init__(self) -> None:
        _check_range("lr", self.lr)
        _check_range("beta", self.beta, below=1, zero=True)

    @property
    def horizon(self) -> int:
        """Implements `Optimizer.horizon`."""
        return momentum_horizon(self.beta)

    def step(self, slab: Slab, slots: KeyArray, rows: Array, now: int) -> Span:
        """Implements `Optimizer.step`."""
        tables = momentum_sums(self.lr, self.beta, self.nesterov)
        settings = np.float32(self.lr), np.float32(self.beta), self.nesterov
        held = slab.values, slab.first, slab.last
        return lambda start, stop: compiled_steps().momentum(
            *held, slots, rows, now, *settings, *tables, start, stop
        )

    def read(self, slab: Slab, slots: KeyArray, out: Array, now: int) -> Span:
        """Implements `Optimizer.read`."""
        sums, _, _ = momentum_sums(self.lr, self.beta, self.nesterov)
        return lambda start, stop: compiled_steps().read_momentum(
            slab.values, slab.first, slab.last, slots, out, now, sums, start, stop
        )


def _step_moments(o: Adam | Yogi, slab: Slab, slots: KeyArray, rows: Array, now: int) -> Span:
    """Implements `Optimizer.step`."""
    decay = _decay(o, now)
    settings = np.array((o.lr, o.b1, 1 - o.b1, o.b2, 1 - o.b2, o.eps), np.float32)
    return lambda start, stop: compiled_steps().moments(
        *slab.arrays, slots, rows, now, settings, o.is_yogi, o.moves_all, decay, start, stop
    )


def _read_moments(o: Adam | Yogi, slab: Slab, slots: KeyArray, out: Array, now: int) -> Span:
    """Implements `Optimizer.read`."""
    decay, eps = _decay(o, now), np.float32(o.eps)
    return lambda start, stop: compiled_steps().read_moments(
        *slab.arrays, slots, out, now, eps, o.moves_all, decay, start, stop
    )


def _decay(o: Adam | Yogi, now: int) -> Decay:
    """The tables reach a power of two of steps: they are made log2(steps) times in a run."""
    return decay_of(o.lr, o.b1, o.b2, not o.is_yogi, 1 << max(now, 1).bit_length())


@dataclass(frozen=True)
class Adam:
    """Adam: m = b1 m + (1 - b1) u, v = b2 v + (1 - b2) u^2, x - eta m^ / (sqrt(v^) + eps).

    `optax.adam`; m^ and v^ are divided by 1 - b1^t and 1 - b2^t. Missed steps have no closed form:
    up to `horizon` of them are added up (about 240 for the usual settings), after which what is
    left of the movement is below 2^-26 of it.

    Args:
        lr: eta, above 0.
        b1: in [0, 1).
        b2: in (0, 1).
        eps: above 0, outside the root.

    Raises:
        InputError: a setting is outside its range.

    Reference: Kingma and Ba 2015; FedAdam in Reddi et al. 2021.
    """

    lr: float
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    initial_moments = (0.0, 0.0)
    moves_all = False
    is_yogi: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _check_moments(self)

    @property
    def horizon(self) -> int:
        """Implements `Optimizer.horizon`."""
        return moments_horizon(self.b1, self.b2, decays=True)

    step = _step_moments
    read = _read_moments


@dataclass(frozen=True)
class Yogi:
    """Adam with v - (1 - b2) sign(v - u^2) u^2, so that v shrinks slowly; `optax.yogi`.

    As in optax, both moments start at `initial`: every row, also one that nobody ever touched,
    moves a little in the first steps.

    Args:
        lr: eta, above 0.
        b1: in [0, 1).
        b2: in (0, 1).
        eps: above 0, outside the root.
        initial: what m and v start with, 0 or more.

    Reference: Zaheer et al. 2018; FedYogi in Reddi et al. 2021.
    """

    lr: float
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-3
    initial: float = 1e-6
    is_yogi: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check_moments(self)
        _check_range("initial", self.initial, zero=True)

    @property
    def initial_moments(self) -> tuple[float, ...]:
        """Implements `Optimizer.initial_moments`."""
        return (self.initial, self.initial)

    @property
    def horizon(self) -> int:
        """Implements `Optimizer.horizon`."""
        return moments_horizon(self.b1, self.b2, decays=False)

    @property
    def moves_all(self) -> bool:
        """Implements `Optimizer.moves_all`."""
        return self.initial > 0

    step = _step_moments
    read = _read_moments


@dataclass(frozen=True)
class WithAdded:
    """Steps all parameters but some by another optimizer; from those, updates are subtracted as
    they are: x - u.

    For what a server keeps beside the model and clients move themselves, such as the control
    variate of SCAFFOLD. It is cut, selected and added up as the model is.

    Args:
        inner: steps the other parameters.
        added: paths of the parameters that are not stepped; a path names all that is below it.
        columns: where those stand in the rows of one part, which `optimizer_of` finds.
    """

    inner: Optimizer
    added: tuple[str, ...]
    columns: tuple[int, ...] = ()

    @property
    def initial_moments(self) -> tuple[Any, ...]:
        """Implements `Optimizer.initial_moments`."""
        return self.inner.initial_moments

    @property
    def horizon(self) -> int:
        """Implements `Optimizer.horizon`."""
        return self.inner.horizon

    @property
    def moves_all(self) -> bool:
        """Implements `Optimizer.moves_all`."""
        return self.inner.moves_all

    def step(self, slab: Slab, slots: KeyArray, rows: Array, now: int) -> Span:
        """Implements `Optimizer.step`."""
        at = np.array(self.columns, np.int64)
        others = rows.copy()
        others[:, at] = 0
        inner = self.inner.step(slab, slots, others, now)

        def work(start: int, stop: int) -> None:
            here = slots[start:stop, None], at
            moved = slab.values[here] - rows[start:stop, at]
            inner(start, stop)
            slab.values[here] = moved  # whatever the optimizer does where gradients are zero

        return work

    def read(self, slab: Slab, slots: KeyArray, out: Array, now: int) -> Span:
        """Implements `Optimizer.read`."""
        at = np.array(self.columns, np.int64)
        inner = self.inner.read(slab, slots, out, now)

        def work(start: int, stop: int) -> None:
            inner(start, stop)
            there = start + np.flatnonzero(slots[start:stop] >= 0)
            out[there[:, None], at] = slab.values[slots[there, None], at]

        return work

    def is_added(self, path: str) -> bool:
        """Whether updates of a parameter are subtracted as they are."""
        return any(path == each or path.startswith(f"{each}/") for each in self.added)


@runtime_checkable
class DiffersByPart(Protocol):
    """An optimizer that steps the parameters of a part in different ways."""

    def of_part(self, part: Part, /) -> Optimizer:
        """Returns what steps the table of one part."""
        ...


def optimizer_of(optimizer: Optimizer, part: Part) -> Optimizer:
    """Returns what steps the table of one part."""
    if isinstance(optimizer, DiffersByPart):
        return optimizer.of_part(part)
    if not isinstance(optimizer, WithAdded):
        return optimizer
    inner = optimizer_of(optimizer.inner, part)
    columns: list[int] = []
    start = 0
    for field in part.fields:
        stop = start + prod(field.slice_shape)
        columns += range(start, stop) if optimizer.is_added(field.path) else ()
        start = stop
    return replace(optimizer, inner=inner, columns=tuple(columns)) if columns else inner


_KINDS: dict[str, Callable[..., Optimizer]] = {
    "sgd": SGD,
    "momentum": Momentum,
    "adagrad": Adagrad,
    "adam": Adam,
    "yogi": Yogi,
}


def optimizer_named(name: str, **settings: Any) -> Optimizer:
    """Returns the optimizer of that name.

    >>> optimizer_named("adam", lr=0.01)
    Adam(lr=0.01, b1=0.9, b2=0.999, eps=1e-08)
    """
    if name not in _KINDS:
        allowed = ", ".join(_KINDS)
        raise InputError(f"no such optimizer: got {name!r}; expected {allowed}; name one")
    return _KINDS[name](**settings)


def describe_optimizer(optimizer: Optimizer) -> dict[str, Any]:
    """Returns name and settings, from which `optimizer_named` makes it again; name and identity of
    one that the library does not ship."""
    if type(optimizer) not in _KINDS.values():
        return {"name": type(optimizer).__qualname__, "identity": identity_of(optimizer)}
    return {"name": type(optimizer).__name__.lower(), **asdict(optimizer)}  # type: ignore[call-overload]


def _check_moments(optimizer: Adam | Yogi) -> None:
    _check_range("lr", optimizer.lr)
    _check_range("eps", optimizer.eps)
    _check_range("b1", optimizer.b1, below=1, zero=True)
    _check_range("b2", optimizer.b2, below=1)


def _check_range(name: str, value: float, below: float = np.inf, zero: bool = False) -> None:
    """Demands a number above 0 (or from 0) and below a bound, as float32 too; NaN fails."""
    is_number = isinstance(value, (int, float, np.floating)) and not isinstance(value, bool)
    with np.errstate(over="ignore", under="ignore"):
        single = np.float32(value) if is_number else np.float32(np.nan)
    if not (0 < single < below or (zero and value == 0)):
        low, high = "[0" if zero else "(0", "infinity" if below == np.inf else f"{below:g}"
        raise InputError(
            f"optimizer setting {name} is out of range: got {value}; expected a number in {low}, "
            f"{high}); choose it in that range; 0.001 to 1 is usual for lr"
        )
