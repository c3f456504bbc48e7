"""Reads and writes records of fields: as JSON, by dotted names, and as options need them.

Imports neither JAX nor Numba: a command reads its options before it loads either.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta, Struct

from keyhole.errors import InputError
from keyhole.identity import Ref
from keyhole.parts import near_miss

VERSION = 6
NONE = "none"
"""Stands for None where a format has no word for it: TOML, and Flower's run config."""


Positive = Annotated[float, Meta(gt=0)]
NotNegative = Annotated[float, Meta(ge=0)]
Count = Annotated[int, Meta(ge=1)]
CountOrNone = Annotated[int, Meta(ge=0)]


def said(doc: str, *flags: str) -> Meta:
    """Returns what a field means, and the option that sets it."""
    return Meta(description=doc, extra={"flag": flags[0]} if flags else {})


class Record(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A record, or a part of one. A name in place of a `Ref` is taken as the `Ref` of that name."""

    def __post_init__(self) -> None:
        for name in _ref_fields(type(self)):
            if isinstance(value := getattr(self, name), str):
                msgspec.structs.force_setattr(self, name, Ref(value))

    def values(self) -> dict[str, Any]:
        """Returns its fields by name; parts of it stay as they are."""
        return msgspec.structs.asdict(self)

    def parts(self, prefix: str = "") -> Iterator[tuple[str, Ref]]:
        """Yields the parts that it names, by the dotted path of their field."""
        for name, value in self.values().items():
            inner = value.items() if isinstance(value, dict) else [("", value)]
            for key, each in inner:
                path = f"{prefix}{name}.{key}".rstrip(".")
                if isinstance(each, Ref):
                    yield path, each
                elif isinstance(each, Record):
                    yield from each.parts(f"{path}.")

    def describe(self) -> dict[str, Any]:
        """Returns it in plain JSON types."""
        told: dict[str, Any] = msgspec.to_builtins(self, enc_hook=_encode)
        return told


@cache
def _ref_fields(kind: type[Record]) -> tuple[str, ...]:
    """The fields that name a part."""
    hints = get_type_hints(kind, include_extras=True)
    return tuple(name for name, hint in hints.items() if _Hint(hint).type is Ref)


_R = TypeVar("_R", bound=Record)
_T = TypeVar("_T")


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


def _encode(part: Any) -> Any:
    """A part that the library ships by its name, one's own as a table."""
    assert isinstance(part, Ref)
    return {"name": part.name, "identity": part.identity} if part.identity else part.name


def _decode(kind: type, told: Any) -> Any:
    assert kind is Ref
    if isinstance(told, Ref | str):
        return Ref(str(told)) if isinstance(told, str) else told
    if isinstance(told, dict) and set(told) <= {"name", "identity"} and "name" in told:
        return Ref(*(str(told.get(each, "")) for each in ("name", "identity")))
    raise ValueError("expected a name, or a table of name and identity")


def convert(kind: type[_R], told: Mapping[str, Any], what: str) -> _R:
    """Returns the record that nested fields say; those with a default may be left out."""
    if not isinstance(told, Mapping):
        raise _unusable(what, f"a {type(told).__name__} in place of fields")
    if (version := told.get("version")) != VERSION:
        is_number = isinstance(version, int | None)
        got = version or "unknown" if is_number else f"{version!r}, a {type(version).__name__}"
        raise InputError(
            f"{what} is of another version: got version {got}; expected {VERSION}; use the version "
            "of keyhole that wrote it, or start a new run"
        )
    try:
        return msgspec.convert(told, kind, dec_hook=_decode)
    except msgspec.ValidationError as error:
        raise _unusable(what, str(error).replace("`$.", "`")) from error


def typed(kind: type[_T], told: Mapping[str, Any]) -> _T:
    """Returns the dataclass that fields say; raises ValueError where one is of another type."""
    try:
        return msgspec.convert(told, kind)
    except msgspec.ValidationError as error:
        raise ValueError(str(error).replace("`$.", "`")) from error


def read(kind: type[_R], told: Mapping[str, Any], what: str) -> _R:
    """Returns the record, once it is known to be whole: what is missing has no default."""
    found = convert(kind, told, what)
    missing = flatten(found.describe()).keys() - flatten(told).keys()
    if missing:
        raise _unusable(what, f"no field {', '.join(sorted(missing))}")
    return found


def _unusable(what: str, got: str) -> InputError:
    return InputError(
        f"{what} cannot be used: got {got}; expected the fields that `keyhole train` writes into "
        "run.json; check how the field is spelled, and its value"
    )


@dataclass(frozen=True)
class SpecField:
    """One field of the record, as options need it."""

    path: str  # dotted, such as "client.lr"
    doc: str
    flag: str  # the option that sets it; empty for none
    type: Any
    bounds: Mapping[str, float]  # as msgspec has them: ge, gt, le, lt
    default: Any  # None if there is none, too
    is_required: bool

    def check(self, name: str, value: Any) -> None:
        """Raises InputError where the field cannot have a value, which the caller gave as `name`.
        None, and values of other types than numbers and choices, are left to the record."""
        if get_origin(self.type) is Literal and value is not None:
            known = get_args(self.type)
            if value not in known:
                raise InputError(
                    f"{name} is not known: got {value!r}; expected {', '.join(known)}; "
                    f"{near_miss(str(value), known)}"
                )
        if get_origin(self.type) is dict and not isinstance(value, Mapping):
            raise InputError(
                f"{name} is no dict: got a {type(value).__name__}; expected names with a number "
                f'each; pass {name}={{"loss": 10.0}}, say'
            )
        if self.type not in (int, float) or value is None:
            return
        kind: Any = int if self.type is int else int | float
        is_number = isinstance(value, kind) and not isinstance(value, bool)
        if not (is_number and all(_TESTS[b](value, at) for b, at in self.bounds.items())):
            words = "a whole number" if self.type is int else "a number"
            wrong = "is out of range" if is_number else f"is not {words}"
            limits = " and ".join(_LIMITS[b].format(at) for b, at in self.bounds.items())
            raise InputError(
                f"{name} {wrong}: got {value!r}; expected {f'{words}, {limits}'.strip(', ')}; pass "
                "such a number"
            )


_TESTS: Mapping[str, Any] = {each: getattr(operator, each) for each in ("ge", "gt", "le", "lt")}
_LIMITS = {"ge": "{} or more", "gt": "more than {}", "le": "at most {}", "lt": "less than {}"}


def spec_fields(kind: type[Struct], prefix: str = "") -> Iterator[SpecField]:
    """Yields the fields of the record in order, those of its parts in their place.

    >>> from keyhole.rounds.spec import RunSpec
    >>> [field.path for field in spec_fields(RunSpec)][:4]
    ['version', 'task', 'data', 'held_out']
    """
    hints = get_type_hints(kind, include_extras=True)
    for each in msgspec.structs.fields(kind):
        path, found = f"{prefix}{each.name}", _Hint(hints[each.name])
        if isinstance(found.type, type) and issubclass(found.type, Record):
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
