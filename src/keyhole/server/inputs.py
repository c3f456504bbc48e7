"""Bounds what one client can add: the L2 norm of its whole update, on devices and where it arrives.

An honest device clips its update before it sends it. A server that adds up updates in the clear
measures each of them, too, and refuses or clips what is above the bound. One that adds up shares or
masked updates sees none, and has the word of devices alone.

The norm is that of the vector that is added up: the parts that everyone receives and the selected
rows together. Rows of a key that a client names r times are added up, and can be sqrt(r) times as
long as they are side by side: an update is measured as if all of its keys were repeated as often as
the one that is repeated most. With different keys, as clients choose them, that is its norm.

Hidden: nothing beyond what the sum hides. Not hidden: every update, from the server that measures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from math import frexp, inf, isfinite, nan, sqrt
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from keyhole.arrays import Array, Tree, read_only
from keyhole.compiled import loop
from keyhole.errors import (
    InputError,
    NoExamplesError,
    NotFiniteError,
    ShapeError,
    TooLargeError,
)
from keyhole.primitives.keyspace import Keys
from keyhole.primitives.report import Report
from keyhole.tree import flatten, map_leaves, unflatten

AboveNorm: TypeAlias = Literal["refuse", "clip"]
"""What is done with an update above the bound, where updates arrive in the clear."""

HeldBy: TypeAlias = Literal["checked", "proved", "unproved"]
"""How a bound on updates is held: measured by who adds them up, proved to them, or kept by honest
devices alone."""

_LARGEST = np.float32(np.finfo(np.float32).max / 2**20)  # a million of them still add up
_TOLERANCE = 1e-4  # a device may measure in 32 bits: what is above by less is taken as it is


@dataclass(frozen=True, repr=False)
class TakenUpdate:
    """What becomes of an update that arrives.

    Args:
        update: to be added up, in float32; None if it is refused.
        norm: as it arrived; None where nobody asked for it, or it has none.
        is_above: whether it was above the bound.
    """

    update: Tree | None
    norm: float | None = None
    is_above: bool = False

    def __repr__(self) -> str:
        """An update may be private."""
        return f"TakenUpdate({'refused' if self.update is None else 'taken'})"


def _any_numbers(update: Tree) -> bool:
    """Nothing else need hold; a lambda would not reach worker processes."""
    return True


@dataclass(frozen=True)
class InputBound:
    """How long an update may be, and what is done with a longer one where it arrives.

    Args:
        max_norm: C, above zero; infinity for no bound.
        above: whether an update above C is refused or clipped to it. NaN and infinity have no norm
            and are refused.
        is_checked: whether who adds up sees updates, and so can measure them.
        keeps_norms: whether norms are asked for where there is no bound, too.
        max_weight: W, where updates are weighted: one with a larger weight counts as W, and an
            update is multiplied by its weight over W. The bound is C times that share, so that
            an update of weight 0 adds nothing. Infinity multiplies by the weight as it is; None
            weighs nothing.
        allows: what else must hold of finite numbers that arrive.

    Raises:
        InputError: C, `above` or W is not allowed.

    >>> bound = InputBound(max_norm=1.0)
    >>> long = {"w": np.array([3.0, 4.0], np.float32)}
    >>> bound.take(long, {}), bound.take(bound.clip(long, {}), {}).is_above
    (TakenUpdate(refused), False)
    """

    max_norm: float = inf
    above: AboveNorm = "refuse"
    is_checked: bool = True
    keeps_norms: bool = False
    max_weight: float | None = None
    allows: Callable[[Tree], bool] = _any_numbers

    def __post_init__(self) -> None:
        if self.max_weight is not None and not self.max_weight > 0:
            raise InputError(
                f"the max weight is invalid: got {self.max_weight}; expected a number above 0; "
                "take the max number of examples of a client"
            )
        if not self.max_norm > 0 or self.above not in ("refuse", "clip"):
            raise InputError(
                f"the bound on updates is invalid: got max norm {self.max_norm}, above it "
                f"{self.above!r}; expected a norm above 0, and refuse or clip; take a few times "
                "the median norm of an update"
            )

    @property
    def is_bound(self) -> bool:
        """Whether there is a bound at all."""
        return self.max_norm < inf

    def limit(self, weight: float | None = None) -> float:
        """Returns how long an update of this weight may be: C, times the weight where the round
        weighs. One without a weight counts as 1, as it does in the sum of weights."""
        if self.max_weight is None or weight is None or not self.is_bound:
            return self.max_norm
        return self.max_norm * weight

    def clip(self, update: Tree, keys: Mapping[str, Keys], weight: float | None = None) -> Tree:
        """Returns what an honest device sends: the update, scaled down to the limit of its weight
        where it is longer.

        NaN and infinity stay as they are: they are refused where the update arrives.
        """
        if not self.is_bound or not _is_finite(update):
            return update
        limit = self.limit(weight)
        if not limit > 0:
            return weighted(update, 0.0)
        return clip(update, limit, lambda each: length_of(each, keys))

    def ready(self, report: Report, keys: Mapping[str, Keys], who: str) -> Report:
        """Returns what an honest device sends: the update weighted where the round weighs, and
        clipped. Its weight is what the update was multiplied by, None where that is nothing.

        Raises:
            InputError: the round weighs, and the report has no weight.
        """
        if self.max_weight is None:
            return replace(report, update=self.clip(report.update, keys), weight=None)
        if report.weight is None:
            raise InputError(
                f"the update of {who} has no weight: got none, and data whose examples the library "
                "cannot count; expected one where means are weighted by examples; return "
                "kh.Report(update, weight=len(examples))"
            )
        weight = report.weight
        if self.max_weight < inf:
            weight = min(weight, self.max_weight) / self.max_weight
        update = self.clip(weighted(report.update, weight), keys, weight)
        return replace(report, update=update, weight=weight)

    def take(
        self, update: Tree, keys: Mapping[str, Keys], weight: float | None = None
    ) -> TakenUpdate:
        """Returns what is added up of an update that arrives in the clear.

        Args:
            weight: what its client says that the update was multiplied by, as `ready` returns it.
        """
        found = usable(update)
        if found is None:
            is_above = self.is_checked and self.is_bound and _is_beyond(update)
            return TakenUpdate(None, is_above=is_above)
        if not self.allows(found):
            return TakenUpdate(None)
        if not self.keeps_norms and not (self.is_bound and self.is_checked):
            return TakenUpdate(found)
        length = length_of(found, keys)
        if not self.is_checked or length <= self.limit(weight) * (1 + _TOLERANCE):
            return TakenUpdate(found, length)
        cut = self.clip(found, keys, weight) if self.above == "clip" else None
        return TakenUpdate(cut, length, is_above=True)

    def refusal(self, taken: TakenUpdate) -> InputError:
        """Returns what a device is told whose update was refused: nothing of the update."""
        if taken.is_above:
            by = "" if self.max_weight is None else " times its weight"
            return TooLargeError(
                "the update is above the max norm of the round: got a longer one; expected an L2 "
                f"norm of at most {self.max_norm:g}{by}, all parts together; clip it to that"
            )
        return NotFiniteError(
            "the update cannot be added up: got NaN, infinity, numbers near them, or a weight that "
            "no examples have; expected finite numbers below 2^108; clip updates, or lower the "
            "learning rate"
        )


UNBOUND = InputBound()
"""Takes every update of finite numbers that can be added up."""


def length_of(update: Tree, keys: Mapping[str, Keys]) -> float:
    """Returns what an update measures: its norm, times the square root of how often its most
    repeated key occurs; see the top of this module.

    Raises:
        NotFiniteError: NaN or infinity in the update.
    """
    repeats = 1
    for z in keys.values():  # rows of a product of key spaces repeat as often as both keys do
        if len(z):
            repeats *= int(np.unique(z.array, return_counts=True)[1].max())
    return norm(update) * sqrt(repeats)


def weighted(update: Tree, weight: float) -> Tree:
    """Returns the update times a weight; one of weight 1 stays as it is."""
    return update if weight == 1 else map_leaves(lambda leaf: _scaled(leaf, weight), update)


def or_zeros(train: Callable[[], Report], like: Tree, metrics: Iterable[str]) -> Report:
    """Returns what training brings; where that has no examples to train on, or is not finite, zeros
    of no weight, without a state.

    For sums that hide updates: one who makes a row NaN would learn who has it, if nothing came.

    Args:
        like: what an update is shaped as.
        metrics: names of those that the sum asks for.
    """
    try:
        report = train()
        if _is_finite(map_leaves(_cast, report.update)):
            return report
    except NoExamplesError:
        report = Report(like, metrics=dict.fromkeys(metrics, nan))
    zeros = map_leaves(lambda leaf: np.zeros_like(np.asarray(leaf)), report.update)
    return replace(report, update=zeros, weight=0.0, state=None)


def usable(update: Tree) -> Tree | None:
    """Returns a client's update in float32, or None if it is not finite or too large to add up.

    >>> usable({"w": np.array([1.0, np.nan])}) is None
    True
    """
    given = flatten(update)
    leaves = {path: _cast(leaf) for path, leaf in given.items()}
    if not all(map(_is_small, leaves.values())):
        return None
    is_same = all(leaf is given[path] for path, leaf in leaves.items())
    return update if is_same else unflatten(update, leaves)


def _cast(leaf: Any) -> NDArray[np.float32]:
    if getattr(leaf, "dtype", None) == np.float32:
        return np.asarray(leaf)
    with np.errstate(over="ignore"):  # infinity is refused, as is what becomes it
        return np.asarray(leaf, np.float32)


def _is_small(leaf: NDArray[np.float32]) -> bool:
    if leaf.flags.c_contiguous and leaf.flags.aligned:
        return all_below(read_only(leaf.reshape(-1)), _LARGEST)
    return all_below.plain(leaf, _LARGEST)


@loop("keyhole.server.row_loops")
def all_below(numbers: NDArray[np.float32], limit: np.float32) -> bool:
    """Whether no number is beyond a limit, or NaN: two passes that write nothing; a NaN is both the
    least and the largest."""
    return numbers.size == 0 or bool(numbers.min() >= -limit and numbers.max() <= limit)


def _is_finite(update: Tree) -> bool:
    return all(bool(np.isfinite(leaf).all()) for leaf in flatten(update).values())


def _is_beyond(update: Tree) -> bool:
    """Whether a refused update is too long, rather than not finite."""
    return not any(bool(np.isnan(leaf).any()) for leaf in flatten(update).values())


def clip(update: Tree, limit: float, length: Callable[[Tree], float] | None = None) -> Tree:
    """Scales a whole update down to a Euclidean norm of at most C; a shorter one stays as it is.

        u min(1, C / |u|)

    The bound holds for the numbers that come out, in their own dtype, not for the real numbers
    before they are rounded.

    Args:
        update: all of it, as it will be added up: what was broadcast and what was selected.
        limit: C, above zero; infinity changes nothing.
        length: what an update measures; `norm` if left out.

    Raises:
        NotFiniteError: NaN or infinity in the update.

    >>> clip({"bias": np.array([3.0]), "rows": np.array([[0.0, 4.0]])}, 10.0)["rows"]
    array([[0., 4.]])
    >>> norm(clip({"bias": np.array([3.0]), "rows": np.array([[0.0, 4.0]])}, 1.0)) <= 1.0
    True
    """
    if not limit > 0:  # NaN too
        raise InputError(
            f"a clipping norm that nothing passes: got {limit}; expected above 0, or infinity for "
            "no clipping; take about the median norm of an update"
        )
    length = norm if length is None else length
    clipped, found, factor = update, length(update), 1.0
    while found > limit:  # rounding to the dtype of a leaf may lengthen it again: shorter then
        factor *= limit / found * (1 - 2.0**-20)
        clipped = map_leaves(lambda leaf, by=factor: _scaled(leaf, by), update)
        found = length(clipped)
    return clipped


def norm(update: Tree) -> float:
    """Returns the Euclidean norm of all leaves together, summed in 64 bits without overflow.

    >>> f"{norm({'a': np.array([3e200]), 'b': [np.array([4e200])]}):.6g}"
    '5e+200'
    """
    leaves = [_numbers(leaf) for leaf in flatten(update).values()]
    peaks = [float(np.abs(leaf).max()) for leaf in leaves if leaf.size]
    if not all(map(isfinite, peaks)):
        raise NotFiniteError(
            "an update with numbers that are none: got NaN or infinity; expected finite numbers; "
            "lower the learning rate, or leave this client out of the round"
        )
    largest = max(peaks, default=0.0)
    if largest == 0:
        return 0.0
    # A power of two: dividing by it loses nothing.
    unit = 2.0 ** min(1000, max(-1000, frexp(largest)[1]))
    return unit * sqrt(sum(float(np.sum(np.square(leaf / unit))) for leaf in leaves))


def _numbers(leaf: Any) -> NDArray[np.float64]:
    numbers = np.asarray(leaf)
    if numbers.dtype.kind in "iubcOSU":
        raise ShapeError(
            f"an update that does not hold real numbers: got {numbers.dtype}; expected floating "
            "point; clip the update before it becomes integers"
        )
    return numbers.astype(np.float64)


def _scaled(leaf: Any, factor: float) -> Array:
    numbers = np.asarray(leaf)
    scaled: Array = numbers * numbers.dtype.type(factor)
    return scaled
