"""RunSpec: everything that decides a run, in one record.

run.json, the manifest's settings, the run config of a Flower app, a TOML file and the options of
the command line are this record. What a field means is said here, once, and is its option's help.

This module imports neither JAX nor Numba: a command reads its options before it loads either.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    Self,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from keyhole.errors import InputError

VERSION = 2
NONE = "none"
"""Stands for None where a format has no word for it: TOML, and Flower's run config."""

Sampling = Literal["fixed", "poisson", "cyclic"]
MeanOver = Literal["cohort", "choosers", "nothing"]

_DRAWN = ("random", "random-top", "independent")
_MAX_SEED = 2**32 - 1
_WHAT = "the record of a run"


def _said(doc: str, *flags: str) -> Meta:
    """What a field means, and the option that sets it."""
    return Meta(description=doc, extra={"flag": flags[0]} if flags else {})


_Positive = Annotated[float, Meta(gt=0)]
_NotNegative = Annotated[float, Meta(ge=0)]
_Count = Annotated[int, Meta(ge=1)]
_CountOrNone = Annotated[int, Meta(ge=0)]
_Share = Annotated[float, Meta(ge=0, lt=1)]


class _Record(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A part of the record."""

    def values(self) -> dict[str, Any]:
        """Returns its fields by name; parts of it stay as they are."""
        return msgspec.structs.asdict(self)

    def describe(self) -> dict[str, Any]:
        """Returns it in plain JSON types."""
        told: dict[str, Any] = msgspec.to_builtins(self)
        return told


_R = TypeVar("_R", bound=_Record)


class CohortSpec(_Record, frozen=True, kw_only=True):
    """Client sampling and simulated dropout."""

    size: Annotated[_Count, _said("Clients per round.", "--cohort")]
    sampling: Annotated[
        Sampling,
        _said("Client sampling: fixed-size without replacement, Poisson, or cyclic.", "--sampling"),
    ] = "fixed"
    over_selection: Annotated[
        Annotated[float, Meta(ge=1)],
        _said(
            "Over-selection: clients asked per update that a round waits for.", "--over-selection"
        ),
    ] = 1.0
    min_updates: Annotated[
        _CountOrNone, _said("Min updates with which a round makes a server step.", "--min-updates")
    ] = 0
    lost_before: Annotated[
        _Share, _said("Share of clients that drop out before they receive slices.")
    ] = 0.0
    lost_after: Annotated[
        _Share, _said("Share of clients that drop out before they send an update.")
    ] = 0.0


class ClientSpec(_Record, frozen=True, kw_only=True):
    """How clients train."""

    algorithm: Annotated[
        str, _said("What clients and the server do with gradients.", "--algorithm")
    ]
    lr: Annotated[_Positive, _said("Learning rate of the clients.", "--client-lr")]
    batch_size: Annotated[_Count, _said("Examples per local step.", "--batch-size")] = 20
    max_examples: Annotated[
        _Count | None, _said("Max examples per client and round.", "--max-examples")
    ] = None
    min_examples: Annotated[
        _Count, _said("Leave out clients with fewer examples.", "--min-examples")
    ] = 1
    proximal: Annotated[_NotNegative, _said("FedProx: weight of the proximal term.")] = 0.01
    negatives: Annotated[
        _Share,
        _said(
            "so_word: share of a client's words drawn at random, for a sampled softmax.",
            "--negatives",
        ),
    ] = 0.0


class KeySpec(_Record, frozen=True, kw_only=True):
    """How clients choose keys of one key space."""

    choice: Annotated[str, _said("How clients choose keys.")]
    count: Annotated[_CountOrNone | None, _said("Max keys per client; none for every key.")]
    shared: Annotated[bool, _said("All clients of a round draw the same keys.")] = False


class ServerSpec(_Record, frozen=True, kw_only=True):
    """How the server steps; the algorithm names its optimizer."""

    lr: Annotated[_Positive, _said("Learning rate of the server.", "--server-lr")]
    eps: Annotated[
        _Positive,
        _said("Adaptive optimizers: added to the denominator of a step."),
    ] = 1e-3


class AggregationSpec(_Record, frozen=True, kw_only=True):
    """How updates are added up."""

    name: Annotated[
        str | None,
        _said(
            "How updates are added up: in the clear; dense at the client; by one server that sees "
            "only sums, dense or as a sketch; by two servers that see nothing.",
            "--aggregation",
        ),
    ] = None
    value_clip: Annotated[
        _Positive,
        _said(
            "Clip each coordinate of an update to [-C, C] before secure aggregation.",
            "--value-clip",
        ),
    ] = 16.0
    ring_bits: Annotated[
        Literal[16, 32],
        _said(
            "Bits of the ring of secure sums: 16 halves what is sent, and rounds to steps 65,536 "
            "times as coarse.",
            "--ring-bits",
        ),
    ] = 32
    signed: Annotated[
        bool,
        _said(
            "Secure sums with one server: clients sign the list of those that remain, so that a "
            "server that shows them different lists is caught. One more message each way.",
            "--signed",
        ),
    ] = False


class PrivacySpec(_Record, frozen=True, kw_only=True):
    """Differential privacy of a client."""

    noise: Annotated[_NotNegative, _said("Noise multiplier: in units of --dp-clip.", "--dp-noise")]
    clip: Annotated[_Positive, _said("L2 clipping norm of a client's update.", "--dp-clip")]
    delta: Annotated[
        Annotated[float, Meta(gt=0, lt=1)],
        _said("Delta, for which epsilon is stated.", "--dp-delta"),
    ] = 1e-6
    budget: Annotated[
        _Positive | None,
        _said("Max epsilon; a round that would spend more does not start.", "--dp-budget"),
    ] = None
    kind: Annotated[
        Literal["all-rows", "thresholded", "correlated"],
        _said(
            "Noise on all rows, on rows that enough clients chose, or correlated over rounds.",
            "--dp-kind",
        ),
    ] = "all-rows"
    threshold: Annotated[
        float,
        _said(
            "With --dp-kind thresholded: rows whose noisy count of clients is lower are dropped.",
            "--dp-threshold",
        ),
    ] = 10.0
    rounds: Annotated[
        _CountOrNone, _said("Rounds that correlated noise is planned for; 0 for other kinds.")
    ] = 0
    bands: Annotated[
        _CountOrNone,
        _said(
            "With --dp-kind correlated: number of bands of the noise-correlation matrix, that is "
            "of rounds over which noise is correlated; 0 for all previous rounds.",
            "--dp-bands",
        ),
    ] = 0


class AsyncSpec(_Record, frozen=True, kw_only=True):
    """Asynchronous rounds."""

    concurrency: Annotated[
        _Count,
        _said(
            "Asynchronous rounds: N clients train at any time, and the server steps whenever "
            "the updates of a cohort have arrived, however old. In process a client takes a "
            "random time, exponential; devices take their own.",
            "--concurrency",
        ),
    ]
    max_staleness: Annotated[
        _CountOrNone,
        _said(
            "With --concurrency: leave out updates that are more server steps old.",
            "--max-staleness",
        ),
    ] = 20


class DeviceSpec(_Record, frozen=True, kw_only=True):
    """What a device is told of a run: how to choose keys and how to train."""

    version: int
    task: str
    sizes: dict[str, int]
    seed: int
    trial: int
    client: ClientSpec
    keys: dict[str, KeySpec]

    @classmethod
    def read(cls, told: Mapping[str, Any]) -> Self:
        """Returns the record that a round carries.

        Raises:
            InputError: it is of another version, or not such a record.
        """
        return _read(cls, told, "the record of a run that the round carries")


class RunSpec(_Record, frozen=True, kw_only=True):
    """Everything that decides a run.

    Attributes are described by their metadata: `keyhole train --help` prints it.
    """

    version: Annotated[int, _said("Version of this record.")] = VERSION
    task: Annotated[str, _said("What is trained: a task's name.")]
    data: Annotated[
        str,
        _said(
            "A file or folder of a known format, a name of `keyhole data list`, or `synthetic`.",
            "--data",
        ),
    ] = "synthetic"
    sizes: Annotated[dict[str, int], _said("Sizes of the model, such as words=50000.")]
    rounds: Annotated[_Count, _said("Rounds of training.", "--rounds")]
    evaluate_every: Annotated[
        _Count, _said("Rounds between two evaluations.", "--evaluate-every")
    ] = 10
    seed: Annotated[
        Annotated[int, Meta(ge=0, le=_MAX_SEED)],
        _said("Seed for all randomness; runs with the same seed are byte-identical.", "--seed"),
    ] = 0
    trial: Annotated[_CountOrNone, _said("Which repetition.")] = 0
    tuning: Annotated[bool, _said("Keep the validation clients out of training.")] = False
    cohort: CohortSpec
    client: ClientSpec
    keys: dict[str, KeySpec]
    server: ServerSpec
    delivery: Annotated[
        str | None,
        _said(
            "How slices reach clients; every delivery trains the same model. A private delivery "
            "that would send more than the whole model is refused.",
            "--delivery",
        ),
    ] = None
    aggregation: AggregationSpec = AggregationSpec()
    mean_over: Annotated[
        MeanOver,
        _said(
            "Divide a key's sum by the cohort (Eq. 5) or by the number of clients that chose the "
            "key.",
            "--mean-over",
        ),
    ] = "cohort"
    privacy: PrivacySpec | None = None
    asynchronous: AsyncSpec | None = None

    def __post_init__(self) -> None:
        drawn = [k for k in self.keys.values() if k.choice in _DRAWN and k.count is not None]
        if self.shared_keys and not all(each.shared for each in drawn):
            raise InputError(
                "fixed keys cannot be mixed with keys that each client draws",
                got=", ".join(f"{space} {_word(each)}" for space, each in self.keys.items()),
                allowed="fixed with top or all",
                fix="choose one of the two",
            )

    @property
    def shared_keys(self) -> bool:
        """Whether all clients of a round draw from the same random numbers."""
        return any(each.shared for each in self.keys.values())

    @classmethod
    def read(cls, told: Mapping[str, Any]) -> Self:
        """Returns the record that `describe` wrote.

        Raises:
            InputError: it is of another version, or a field is unknown, missing or of another type.
        """
        return _read(cls, told, _WHAT)

    def for_devices(self) -> dict[str, Any]:
        """Returns what a device may know, and all that it needs to train; see `DeviceSpec`."""
        told = self.describe()
        return {name: told[name] for name in DeviceSpec.__struct_fields__}

    def changed(self, changes: Mapping[str, Any]) -> Self:
        """Returns the record with fields changed.

        Args:
            changes: nested as in `describe`, or with dotted names: {"client.lr": 0.1}; tables are
                merged.

        Raises:
            InputError: a field is unknown or of another type.
        """
        return _convert(type(self), merge(self.describe(), nest(changes)), _WHAT)

    def with_trial(self, trial: int) -> Self:
        """Returns the record of another repetition."""
        return replace(self, trial=trial)


def flatten(told: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a record with dotted names and no None, for formats that have neither tables nor
    None.

    >>> flatten({"rounds": 3, "client": {"lr": 0.1, "max_examples": None}})
    {'rounds': 3, 'client.lr': 0.1, 'client.max_examples': 'none'}
    """
    flat: dict[str, Any] = {}
    for name, value in told.items():
        if isinstance(value, Mapping):
            flat |= {f"{name}.{inner}": leaf for inner, leaf in flatten(value).items()}
        else:
            flat[name] = NONE if value is None else value
    return flat


def nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what `flatten` was given; tables that are there already stay tables.

    >>> nest({"rounds": 3, "client.lr": 0.1, "client": {"max_examples": "none"}})
    {'rounds': 3, 'client': {'lr': 0.1, 'max_examples': None}}
    """
    nested: dict[str, Any] = {}
    for name, value in flat.items():
        first, _, rest = name.partition(".")
        if rest:
            given: Any = nest({rest: value})
        elif isinstance(value, Mapping):
            given = nest(value)
        else:
            given = None if value == NONE else value
        nested = merge(nested, {first: given})
    return nested


def merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Returns two nested sets of fields as one; the second wins where both have a field."""
    merged = dict(below)
    for name, value in above.items():
        if isinstance(value, Mapping):
            known = merged.get(name)
            merged[name] = merge(known if isinstance(known, Mapping) else {}, value)
        else:
            merged[name] = value
    return merged


def _convert(kind: type[_R], told: Mapping[str, Any], what: str) -> _R:
    if told.get("version") != VERSION:
        raise InputError(
            f"{what} is of another version",
            got=f"version {told.get('version') or 'unknown'}",
            allowed=VERSION,
            fix="use the version of keyhole that wrote it, or start the run anew",
        )
    try:
        return msgspec.convert(told, kind)
    except msgspec.ValidationError as error:
        raise _unusable(what, str(error).replace("`$.", "`")) from error


def _read(kind: type[_R], told: Mapping[str, Any], what: str) -> _R:
    """The record, once it is known to be whole: what is missing has no default."""
    found = _convert(kind, told, what)
    missing = flatten(found.describe()).keys() - flatten(told).keys()
    if missing:
        raise _unusable(what, f"no field {', '.join(sorted(missing))}")
    return found


def _unusable(what: str, got: str) -> InputError:
    return InputError(
        f"{what} cannot be used",
        got=got,
        allowed="the fields that `keyhole train` writes into run.json",
        fix="check how the field is spelled, and its value",
    )


def _word(keys: KeySpec) -> str:
    return "fixed" if keys.shared and keys.choice in _DRAWN else keys.choice


@dataclass(frozen=True)
class SpecField:
    """One field of the record, as options need it.

    Args:
        path: dotted, such as "client.lr".
        doc: what it means.
        flag: the option that sets it; empty for none.
        type: without metadata and None.
        bounds: as msgspec has them: ge, gt, le, lt.
        default: None if there is none, or if it is None.
        is_required: whether it has no default.
    """

    path: str
    doc: str
    flag: str
    type: Any
    bounds: Mapping[str, float]
    default: Any
    is_required: bool


def spec_fields(kind: type[Struct] = RunSpec, prefix: str = "") -> Iterator[SpecField]:
    """Yields the fields of the record in order, those of its parts in their place.

    >>> [field.path for field in spec_fields()][:4]
    ['version', 'task', 'data', 'sizes']
    """
    hints = get_type_hints(kind, include_extras=True)
    for each in msgspec.structs.fields(kind):
        path, found = f"{prefix}{each.name}", _Hint(hints[each.name])
        if isinstance(found.type, type) and issubclass(found.type, _Record):
            yield from spec_fields(found.type, f"{path}.")
            continue
        default = None if each.default is msgspec.NODEFAULT else each.default
        yield SpecField(
            path, found.doc, found.flag, found.type, found.bounds, default, each.required
        )


class _Hint:
    """A type hint taken apart: the type alone, and what its metadata says."""

    def __init__(self, hint: Any) -> None:
        self.doc, self.flag, self.bounds = "", "", dict[str, float]()
        self.type = self._peel(hint)

    def _peel(self, hint: Any) -> Any:
        if get_origin(hint) is Annotated:
            inner, *notes = get_args(hint)
            for note in notes:
                self.doc = note.description or self.doc
                self.flag = (note.extra or {}).get("flag", self.flag)
                limits = {name: getattr(note, name) for name in ("ge", "gt", "le", "lt")}
                self.bounds |= {name: at for name, at in limits.items() if at is not None}
            return self._peel(inner)
        if get_origin(hint) in (Union, UnionType):
            (inner,) = [each for each in get_args(hint) if each is not type(None)]
            return self._peel(inner)
        return hint
