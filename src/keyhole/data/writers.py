"""Makes handwriting from a seed: 62 characters in a font, bent and drawn in a style per writer.

Glyphs of the fonts that matplotlib ships are rendered once, as distances to the outline. A writer
has a font, a slant, a stroke, a size, a way to bend lines and characters it writes more often than
others; an image is the glyph seen through the writer's warp and a smaller one of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from string import ascii_lowercase, ascii_uppercase, digits
from typing import TypeAlias

import numpy as np

from keyhole.arrays import Array
from keyhole.data.federated import Dataset, FederatedData
from keyhole.data.synthetic import FACTS, DataStream, check_sizes, draw_count, stream

CHARACTERS = digits + ascii_uppercase + ascii_lowercase
SIDE = 28  # pixels of an image
GLYPH = 20  # pixels of the longer side of an unwarped glyph

# Fonts of matplotlib that have all characters and draw them as letters.
FONTS = (
    *(f"DejaVuSans{style}" for style in ("", "-Bold", "-BoldOblique", "-Oblique")),
    *(f"DejaVuSansMono{style}" for style in ("", "-Bold", "-BoldOblique", "-Oblique")),
    *(f"DejaVuSerif{style}" for style in ("", "-Bold", "-BoldItalic", "-Italic")),
    *(f"STIXGeneral{style}" for style in ("", "Bol", "BolIta", "Italic")),
    *("cmb10", "cmmi10", "cmr10", "cmss10", "cmti10", "cmtt10"),
)

FINENESS = 2.5  # pixels of a master for each pixel of an image
MASTER = 72  # side of a master, room for a glyph and its surroundings
REACH = 6  # pixels of a master beyond which distances are not told apart

CLASS_CONCENTRATION = 0.7  # of the Dirichlet law of a writer's characters: below 1 is uneven
TEST_PART = 10  # one image in this many is for testing
KNOTS = 4  # a bend goes smoothly through KNOTS x KNOTS random shifts

# Standard deviations. Affine: slant, rotation, log width, log height, shift right, shift down.
AFFINE = np.array([0.25, 0.12, 0.12, 0.08, 0.8, 0.8], np.float32)
AFFINE_OF_IMAGE = np.array([0.07, 0.06, 0.06, 0.06, 0.5, 0.5], np.float32)
BEND, BEND_OF_IMAGE = 0.7, 0.7
# Ranges.
THICKNESS, NOISE, INK = (-0.3, 1.0), (0.01, 0.1), (0.75, 1.0)


_Written: TypeAlias = tuple[Array, Array]
"""Images and labels of one writer."""


@dataclass(frozen=True, eq=False)
class _Style:
    """How one writer writes; lengths are in pixels of an image."""

    font: int
    classes: Array  # how likely each character is, float64 (62,)
    affine: Array  # float32 (6,), as in AFFINE
    bend: Array  # shifts at the knots, float32 (2, KNOTS, KNOTS)
    thickness: float  # added to each side of a stroke
    noise: float  # standard deviation, where full ink is 1
    ink: float  # how dark a stroke is


def make_writers(
    seed: int, *, writers: int = 200, min_images: int = 20, max_images: int = 200
) -> Dataset:
    """Returns images of characters by writer, a function of the arguments and the fonts alone.

    The last tenth of each writer's images is in "test", at least one; the rest in "train". The
    images of writer i do not depend on the number of writers. Images are centred and scaled as in
    EMNIST, so o, O and 0, or s and S, can hardly be told apart.

    Args:
        writers: 1 or more; all are in both splits.
        min_images: images of a writer, 2 or more.
        max_images: images of a writer, `min_images` or more.

    >>> data = make_writers(7, writers=2, min_images=10, max_images=10)
    >>> data.splits["train"].client(0)["pixels"].shape, data.names["classes"][10]
    ((9, 28, 28), 'A')
    """
    images = {"min_images": (min_images, 2), "max_images": (max_images, min_images)}
    check_sizes(seed=(seed, 0), writers=(writers, 1), **images)
    streams = [stream(seed, DataStream.WRITER, i) for i in range(writers)]
    styles = [_draw_style(rng) for rng in streams]
    masters = {font: _make_masters(FONTS[font]) for font in sorted({s.font for s in styles})}
    written = [
        _write(style, masters[style.font], rng, min_images, max_images)
        for style, rng in zip(styles, streams, strict=True)
    ]
    train, test = zip(*map(_cut, written), strict=True)
    splits = {"train": _join(train), "test": _join(test)}
    facts = {**FACTS, "fonts": "DejaVu, STIX and Computer Modern of matplotlib"}
    return Dataset("synthetic", "writers", splits, {"classes": list(CHARACTERS)}, facts)


def _cut(written: _Written) -> tuple[_Written, _Written]:
    """What a writer wrote to train on, and to test on."""
    kept = len(written[1]) - max(1, len(written[1]) // TEST_PART)
    return (written[0][:kept], written[1][:kept]), (written[0][kept:], written[1][kept:])


def _join(written: Sequence[_Written]) -> FederatedData:
    pixels, labels = zip(*written, strict=True)
    ids = [f"writer{i}" for i in range(len(written))]
    columns = {"pixels": np.concatenate(pixels), "label": np.concatenate(labels)}
    return FederatedData.of(ids, [len(label) for label in labels], columns)


def _write(
    style: _Style, masters: Array, rng: np.random.Generator, min_images: int, max_images: int
) -> _Written:
    """The images of one writer, uint8 (n, 28, 28), and their labels, uint8 (n,)."""
    count = draw_count(rng, min_images, max_images)
    labels = rng.choice(len(CHARACTERS), count, p=style.classes)
    at = _warp(
        style.affine + AFFINE_OF_IMAGE * rng.standard_normal((count, 6), np.float32),
        style.bend + BEND_OF_IMAGE * rng.standard_normal((count, 2, KNOTS, KNOTS), np.float32),
    )
    distance = _sample(masters, labels, at)
    ink = style.ink * np.clip(0.5 + style.thickness - distance, 0.0, 1.0)
    ink += style.noise * rng.standard_normal(ink.shape, np.float32)
    pixels = np.rint(255.0 * (1.0 - np.clip(ink, 0.0, 1.0)))
    return pixels.astype(np.uint8), labels.astype(np.uint8)


def _draw_style(rng: np.random.Generator) -> _Style:
    return _Style(
        font=int(rng.integers(len(FONTS))),
        classes=rng.dirichlet(np.full(len(CHARACTERS), CLASS_CONCENTRATION)),
        affine=AFFINE * rng.standard_normal(6, np.float32),
        bend=BEND * rng.standard_normal((2, KNOTS, KNOTS), np.float32),
        thickness=rng.uniform(*THICKNESS),
        noise=rng.uniform(*NOISE),
        ink=rng.uniform(*INK),
    )


def _warp(affine: Array, bend: Array) -> Array:
    """Where each pixel of an image lies on the glyph, from its centre, (n, 2, 28, 28): down, right.

    The inverse of: stretch, slant, rotate, shift, bend.
    """
    n = len(affine)
    slant, turn, width, height, right, down = affine.T[:, :, None]
    middle = np.arange(SIDE, dtype=np.float32) - (SIDE - 1) / 2
    weights = _knot_weights()
    y, x = np.moveaxis(weights @ bend @ weights.T, 1, 0).reshape(2, n, -1)
    y += np.repeat(middle, SIDE)[None, :] - down
    x += np.tile(middle, SIDE)[None, :] - right
    x, y = np.cos(turn) * x + np.sin(turn) * y, np.cos(turn) * y - np.sin(turn) * x
    x += slant * y
    return np.stack([y * np.exp(-height), x * np.exp(-width)], axis=1).reshape(n, 2, SIDE, SIDE)


def _knot_weights() -> Array:
    """How much each knot counts at each pixel, float32 (28, KNOTS); rows add up to 1."""
    place = np.linspace(0, KNOTS - 1, SIDE)
    near = np.clip(1.0 - np.abs(place[:, None] - np.arange(KNOTS)), 0.0, 1.0)
    return (near * near * (3.0 - 2.0 * near)).astype(np.float32)


def _sample(masters: Array, labels: Array, at: Array) -> Array:
    """Reads masters between their pixels, linearly: distances in pixels of an image."""
    at = np.clip(FINENESS * at + (MASTER - 1) / 2, 0, MASTER - 1.001).astype(np.float32)
    cell = at.astype(np.int64)
    y, x = np.moveaxis(at - cell, 1, 0)
    first = (labels[:, None, None] * MASTER + cell[:, 0]) * MASTER + cell[:, 1]
    flat = masters.ravel()
    above = flat[first] * (1 - x) + flat[first + 1] * x
    below = flat[first + MASTER] * (1 - x) + flat[first + MASTER + 1] * x
    return np.asarray(above * (1 - y) + below * y)


def _make_masters(font: str) -> Array:
    """Signed distances to the outline in pixels of an image, float32 (62, MASTER, MASTER).

    Negative inside. Strokes of any thickness are levels of one such field.
    """
    is_ink = _render(font)
    # A distance to a pixel's centre is half a pixel more than one to its edge.
    signed = np.where(is_ink, 0.5 - _distance(~is_ink), _distance(is_ink) - 0.5)
    return (signed / FINENESS).astype(np.float32)


def _render(font: str) -> Array:
    """The characters of a font, each scaled to the same longer side and centred, bool."""
    from matplotlib import get_data_path  # slow to import, and needed here alone
    from matplotlib.ft2font import FT2Font, LoadFlags

    face = FT2Font(str(Path(get_data_path(), "fonts", "ttf", f"{font}.ttf")))
    images = np.zeros((len(CHARACTERS), MASTER, MASTER), bool)
    for image, character in zip(images, CHARACTERS, strict=True):
        face.set_size(100, 72)
        glyph = face.load_char(ord(character), LoadFlags.NO_HINTING)
        longer = max(glyph.width, glyph.height) / 64  # told in 64ths of a pixel
        face.set_size(100 * GLYPH * FINENESS / longer, 72)
        face.set_text(character, flags=LoadFlags.NO_HINTING)
        face.draw_glyphs_to_bitmap(antialiased=True)
        _centre(np.asarray(face.get_image()) > 127, image)
    return images


def _centre(drawn: Array, image: Array) -> None:
    """Copies what is drawn, without empty lines around it, to the middle of an image."""
    rows, columns = np.flatnonzero(drawn.any(axis=1)), np.flatnonzero(drawn.any(axis=0))
    drawn = drawn[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    top, left = (MASTER - drawn.shape[0]) // 2, (MASTER - drawn.shape[1]) // 2
    image[top : top + drawn.shape[0], left : left + drawn.shape[1]] = drawn


def _distance(is_target: Array) -> Array:
    """From each pixel to the nearest target, up to REACH or a little more, float32.

    The square of a distance is a least sum of squares along one axis, then along the other.
    """
    squares = np.where(is_target, 0, 2 * REACH**2).astype(np.uint8)
    for axis in (-1, -2):
        lines = np.moveaxis(squares, axis, -1)
        nearest = lines.copy()
        for k in range(1, REACH + 1):
            np.minimum(nearest[..., k:], lines[..., :-k] + np.uint8(k * k), out=nearest[..., k:])
            np.minimum(nearest[..., :-k], lines[..., k:] + np.uint8(k * k), out=nearest[..., :-k])
        squares = np.moveaxis(nearest, -1, axis)
    return np.sqrt(squares, dtype=np.float32)
