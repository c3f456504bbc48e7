"""Names the extra that brings a library which is not installed.

keyhole itself needs what a device needs. What trainers and services need comes with extras.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec

from keyhole.errors import InputError

EXTRAS: Mapping[str, tuple[str, ...]] = {
    "train": ("jax", "jaxlib", "llvmlite", "matplotlib", "numba", "prometheus_client", "rich"),
    "serve": ("httptools", "llvmlite", "numba", "prometheus_client", "rich", "uvicorn", "uvloop"),
    "flower": ("flwr",),
    "onnx": ("onnx", "onnxscript"),
}
"""Extra -> modules that come with it, and that keyhole imports without asking whether they are
there."""


def lacking(error: ModuleNotFoundError, what: str, wants: str = "") -> InputError | None:
    """Returns what to say where a library of an extra is not installed; None if it is of none.

    Args:
        error: of the import.
        what: cannot be had without.
        wants: the extra to name, of several that bring the library.

    >>> print(lacking(ModuleNotFoundError(name="uvicorn"), "keyhole serve"))
    keyhole serve needs more than is installed: got no uvicorn; expected what the extra 'serve' \
brings; pip install 'keyhole[serve]'
    """
    library = (error.name or "").partition(".")[0]
    found = [extra for extra, modules in EXTRAS.items() if library in modules]
    if not found:
        return None
    extra = wants if wants in found else found[0]
    return InputError(
        f"{what} needs more than is installed: got no {library}; expected what the extra "
        f"'{extra}' brings; pip install 'keyhole[{extra}]'"
    )


def check_installed(extra: str, what: str) -> None:
    """Raises InputError, as `lacking` words it, where a library of an extra is not installed."""
    for module in EXTRAS[extra]:
        if find_spec(module) is None:
            missing = lacking(ModuleNotFoundError(name=module), what, extra)
            assert missing is not None
            raise missing
