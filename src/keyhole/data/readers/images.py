"""Says what all files of handwriting have in common: 62 characters, 28 x 28 pixels."""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from keyhole.arrays import Array
from keyhole.data.readers.source import bad_file

CLASSES = string.digits + string.ascii_uppercase + string.ascii_lowercase
"""The character of each label, as in LEAF and TensorFlow Federated."""

TFF_FACTS = {
    "source": "Federated EMNIST of TensorFlow Federated: NIST Special Database 19 by writer",
    "licence": "public domain (NIST)",
}

_SIDE = 28


def class_names() -> Mapping[str, Sequence[str]]:
    """Returns the names of labels for a dataset of writers."""
    return {"classes": list(CLASSES)}


def to_examples(path: Path, pixels: Any, labels: Any) -> dict[str, Array]:
    """Returns columns of one writer from what a file holds.

    Args:
        pixels: (n, 28, 28) or (n, 784), uint8, or floats from 0 (ink) to 1 (paper).
        labels: (n,) whole numbers below 62.

    >>> to_examples(Path("f"), np.ones((1, 784)), [3])["pixels"][0, 0, :2].tolist()
    [255, 255]
    """
    images, classes = _array(path, pixels), _array(path, labels).reshape(-1)
    if images.size != len(classes) * _SIDE * _SIDE or len(images) != len(classes):
        expected = f"an image of {_SIDE} x {_SIDE} for each label"
        raise bad_file(path, got=f"{images.shape} for {len(classes)} labels", allowed=expected)
    if classes.dtype.kind not in "iu" or not _within(classes, len(CLASSES) - 1):
        raise bad_file(path, got=_range(classes, "labels"), allowed="whole numbers from 0 to 61")
    return {
        "pixels": _to_bytes(path, images).reshape(-1, _SIDE, _SIDE),
        "label": classes.astype(np.uint8),
    }


def _array(path: Path, values: Any) -> Array:
    try:
        array = np.asarray(values)
    except ValueError:  # rows of unequal length
        array = np.empty(0, object)
    if array.dtype.kind not in "iufb" or array.ndim == 0:
        raise bad_file(path, got="images or labels that are no array", allowed="arrays of numbers")
    return array


def _to_bytes(path: Path, images: Array) -> Array:
    """Floats from 0 to 1 become bytes from 0 to 255."""
    if images.dtype == np.uint8:
        return images
    if not _within(images, 1):
        raise bad_file(path, got=_range(images, "pixels"), allowed="floats from 0 to 1")
    return np.rint(images * 255.0).astype(np.uint8)


def _within(values: Array, limit: float) -> bool:
    """NaN is not within."""
    return values.size == 0 or bool((values.min() >= 0) & (values.max() <= limit))


def _range(values: Array, what: str) -> str:
    return f"{what} of {values.dtype} from {values.min()} to {values.max()}"
