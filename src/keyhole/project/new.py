"""Writes a small project that trains: people rate films, and each holds the rows of its own."""

from __future__ import annotations

import random
from importlib.resources import files
from pathlib import Path

from keyhole.errors import InputError
from keyhole.files import make_directory, storage_errors

_TEMPLATE = "template"
_DEVICES, _FILMS, _EACH = 3, 2000, 40
_SEED = 0


def write_project(folder: Path) -> list[Path]:
    """Writes the project's files; returns their paths.

    Raises:
        InputError: the folder holds something.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(
            f"{folder} is in use: got a folder that is not empty; expected a new one; choose "
            "another name"
        )
    make_directory(folder / "devices")
    texts = {each.stem: each.read_text() for each in _template()}
    texts["README.md"] = texts["README.md"].replace("PROJECT", folder.resolve().name)
    texts |= {f"devices/device-{i}.csv": text for i, text in enumerate(_examples())}
    for name, text in texts.items():
        with storage_errors(folder / name, "write"):
            (folder / name).write_text(text)
    return [folder / name for name in texts]


def _template() -> list[Path]:
    found = [Path(str(each)) for each in files("keyhole.project").joinpath(_TEMPLATE).iterdir()]
    return sorted(each for each in found if each.suffix == ".in")


def _examples() -> list[str]:
    """Ratings of the try-out's devices, each by some people of its own."""
    rng, found = random.Random(_SEED), []  # nosec B311 - an example
    for _ in range(_DEVICES):
        films = [int(_FILMS * rng.random() ** 4) for _ in range(_EACH)]
        rows = [f"{film},{1 + film % 5 + rng.random() - 0.5:.2f}" for film in films]
        found.append("\n".join(["film,stars", *rows]) + "\n")
    return found
