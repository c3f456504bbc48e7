"""Writes a directory that `flwr run` takes, with the tasks of keyhole as its app."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import isfinite
from pathlib import Path
from typing import Any

from keyhole.errors import InputError
from keyhole.files import storage_errors

_PACKAGE = "keyhole_app"

_PYPROJECT = """\
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"

[project]
name = "keyhole-app"
version = "1.0.0"
description = "A task of federated select, on devices"
license = "Apache-2.0"
dependencies = ["flwr==1.41.0", "keyhole"]

# Devices receive the package and nothing else: records and rounds name clients.
[tool.flwr.app]
publisher = "keyhole"
fab-include = ["{package}/**/*.py"]

[tool.flwr.app.components]
serverapp = "{package}.server:app"
clientapp = "{package}.client:app"

# What may stand here is told in keyhole.engines.flower.config.
[tool.flwr.app.config]
{config}
"""

_FILES = {
    "__init__.py": '"""A task of federated select, on devices."""\n',
    "server.py": '"""The server."""\n\nfrom keyhole.engines.flower.app import server_app\n\n'
    "app = server_app\n",
    "client.py": '"""The devices."""\n\nfrom keyhole.engines.flower.app import client_app\n\n'
    "app = client_app\n",
}


def write_project(directory: Path, config: Mapping[str, Any]) -> None:
    """Writes a Flower project that trains a task.

    Args:
        directory: is made where it is missing.
        config: the run config: texts, whole numbers, numbers and truth values by name.

    Raises:
        InputError: the directory holds a project already, or a value is of another kind.
        StorageError: it cannot be written.
    """
    path = directory / "pyproject.toml"
    if path.exists():
        raise InputError(
            f"{directory} holds a project already",
            got=path.name,
            allowed="a directory without one",
            fix="choose another directory, or edit the project that is there",
        )
    lines = [f"{name} = {_toml(name, value)}" for name, value in config.items()]
    with storage_errors(path, "write"):
        (directory / _PACKAGE).mkdir(parents=True, exist_ok=True)
        path.write_text(_PYPROJECT.format(package=_PACKAGE, config="\n".join(lines)))
        for name, text in _FILES.items():
            (directory / _PACKAGE / name).write_text(text)


def _toml(name: str, value: Any) -> str:
    """A value as TOML has it; JSON writes texts, finite numbers and truth values the same way."""
    if not isinstance(value, str | int | float):
        raise InputError(
            f"the run config has a {name} that TOML cannot hold",
            got=type(value).__name__,
            allowed="a text, a number or a truth value",
            fix="leave it out",
        )
    if isinstance(value, float) and not isfinite(value):
        return repr(value)
    return json.dumps(value, ensure_ascii=False)
