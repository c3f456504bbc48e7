"""Where a dataset comes from: a path, or a bare name in the folder KEYHOLE_DATA."""

from __future__ import annotations

import os
from pathlib import Path

from keyhole.errors import InputError

__all__ = ["SHARED", "data_folder", "locate"]

SHARED = {
    "femnist": "femnist.npz",
    "femnist_mini": "femnist_mini.npz",
    "movielens_small": "movielens_small.npz",
    "stackexchange": "stackexchange.jsonl.xz",
    "stackexchange_mini": "stackexchange_mini.jsonl.xz",
}
"""Files that go by a bare name: name -> the file in the folder KEYHOLE_DATA."""


def data_folder() -> Path | None:
    """Returns the folder that the environment variable KEYHOLE_DATA names."""
    folder = os.environ.get("KEYHOLE_DATA")
    return Path(folder) if folder else None


def locate(source: str | Path) -> Path:
    """Returns the path of a source; a bare name is looked up in the folder KEYHOLE_DATA only.

    Raises:
        InputError: there is nothing there.
    """
    name = str(source)
    path = _shared(name) if name in SHARED else Path(source)
    if not path.exists():
        raise InputError(
            f"cannot find {name}",
            got=f"no file {path}",
            allowed=f"a path, an imported dataset, or one of {', '.join(SHARED)}",
            fix="give the path of a file, or a name of `keyhole data list`",
        )
    return path


def _shared(name: str) -> Path:
    folder = data_folder()
    if folder is None:
        raise InputError(
            f"cannot find {name}",
            got="no environment variable KEYHOLE_DATA",
            allowed=f"the folder that holds {SHARED[name]}",
            fix="set KEYHOLE_DATA, or give the path of a file",
        )
    return folder / SHARED[name]
