"""Fields: a JSON file read as what it should be, or refused by the name of the field."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keyhole.errors import InputError

__all__ = ["Fields", "read_json", "short"]


@dataclass(frozen=True)
class Fields:
    """The fields of one JSON object.

    Args:
        values: name -> value.
        path: of the file.
        what: it should be, for errors.
        inside: where in the file the object stands, for errors.
    """

    values: Mapping[str, Any]
    path: Path
    what: str
    inside: str = ""

    def require(self, name: str, is_right: bool, allowed: str) -> None:
        """Raises InputError that names the file and the field unless its value is right."""
        if is_right:
            return
        raise InputError(
            f"{short(self.path)} is not {self.what}: field {self.inside}{name}",
            got=_shorten(self.values[name]) if name in self.values else "nothing",
            allowed=allowed,
            fix="run the sweep again, or move the file away",
        )

    def text(self, name: str, default: str | None = None) -> str:
        """Returns a printable text."""
        value = self.values.get(name, default)
        is_right = isinstance(value, str) and value.isprintable()
        self.require(name, is_right, "printable text on one line")
        return str(value)

    def texts(self, name: str) -> list[str]:
        """Returns a list of texts."""
        values = self.values.get(name)
        is_right = isinstance(values, list) and all(isinstance(v, str) for v in values)
        self.require(name, is_right, "a list of texts")
        return list(values or [])

    def count(self, name: str, default: int | None = None) -> int:
        """Returns a whole number from 0."""
        value = self.values.get(name, default)
        is_right = isinstance(value, int) and not isinstance(value, bool) and value >= 0
        self.require(name, is_right, "a whole number, 0 or more")
        return int(value or 0)

    def number(self, name: str, default: float | None) -> float | None:
        """Returns a finite number, or the default if there is none."""
        value = self.values.get(name)
        if value is None:
            return default
        self.require(name, _is_number(value) and math.isfinite(value), "a finite number")
        return float(value)

    def require_number(self, name: str) -> float:
        """Returns a finite number that has to be there."""
        self.require(name, self.values.get(name) is not None, "a finite number")
        return float(self.number(name, None) or 0.0)

    def numbers(self, name: str) -> dict[str, float]:
        """Returns names and numbers; a run that diverged has some that are not finite."""
        values = self.values.get(name)
        is_right = isinstance(values, dict) and all(_is_number(v) for v in values.values())
        self.require(name, is_right, "names and numbers")
        return {key: float(value) for key, value in dict(values or {}).items()}

    def record(self, name: str) -> Fields:
        """Returns the fields of an object inside this one."""
        value = self.values.get(name)
        self.require(name, isinstance(value, dict), "a JSON object")
        return Fields(dict(value or {}), self.path, self.what, f"{self.inside}{name}.")

    def records(self, name: str) -> list[Fields]:
        """Returns the fields of each object of a list."""
        values = self.values.get(name)
        is_right = isinstance(values, list) and all(isinstance(v, dict) for v in values)
        self.require(name, is_right, "a list of JSON objects")
        return [
            Fields(value, self.path, self.what, f"{self.inside}{name}[{i}].")
            for i, value in enumerate(values or [])
        ]


def read_json(path: Path, what: str) -> Fields:
    """Returns the fields of a file that holds one JSON object.

    Args:
        path: of the file.
        what: it should be, for errors: "a sweep".

    Raises:
        InputError: it cannot be read or holds something else.
    """
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise _foreign(path, what, f"{type(error).__name__}: {error}") from error
    if not isinstance(value, dict):
        raise _foreign(path, what, _shorten(value))
    return Fields(value, path, what)


def short(path: Path) -> str:
    """Returns the end of a path, enough to find the file: trial-0/run.json is too little."""
    return "/".join(path.parts[-3:]) if path.parent.name.startswith("trial-") else path.name


def _foreign(path: Path, what: str, got: str) -> InputError:
    return InputError(
        f"{short(path)} is not {what}",
        got=got,
        allowed="a JSON object as `keyhole sweep` writes it",
        fix="run the sweep again, or move the file away",
    )


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _shorten(value: object) -> str:
    """A value as one short line of an error."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
