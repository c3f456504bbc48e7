"""Says how many keys a device can afford, by the memory it has.

The paper's section 3 notes that select lets devices of different strength train models of different
size. A device class says how common such devices are and how many bytes of model they hold. Where
several key spaces are cut alike, `share_of_keys` gives each the same share (sections 4.1.3, 5.4).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import isclose

import numpy as np

from keyhole.errors import InputError
from keyhole.primitives.keyspace import KeySpace
from keyhole.primitives.layout import Layout


@dataclass(frozen=True)
class DeviceClass:
    """A kind of device.

    Args:
        name: such as "phone" or "watch".
        share: which share of the population is of this kind, above 0 and at most 1.
        model_bytes: how many bytes of model such a device can hold.

    Raises:
        InputError: a number is out of range.
    """

    name: str
    share: float
    model_bytes: int

    def __post_init__(self) -> None:
        if self.model_bytes < 1:
            raise InputError(
                f"device class {self.name!r} holds nothing: got {self.model_bytes} bytes; expected "
                "1 or more; give the memory it has for a model"
            )
        if not 0 < self.share <= 1:
            raise InputError(
                f"share of device class {self.name!r} is out of range: got {self.share}; expected "
                "above 0, at most 1; shares of all classes add up to 1"
            )


def assign_device(classes: Sequence[DeviceClass], rng: np.random.Generator) -> DeviceClass:
    """Draws the class of one client; a client keeps its class if `rng` is a function of the client.

    Raises:
        InputError: the shares do not add up to 1.

    >>> phone, watch = DeviceClass("phone", 0.75, 4000), DeviceClass("watch", 0.25, 400)
    >>> assign_device([phone, watch], np.random.default_rng(0)).name
    'phone'
    """
    shares = [device.share for device in classes]
    if not isclose(sum(shares), 1.0, abs_tol=1e-9):
        raise InputError(
            f"shares of device classes do not add up: got {sum(shares)}; expected 1; let the "
            "shares of all classes add up to 1"
        )
    return classes[int(rng.choice(len(classes), p=np.array(shares) / sum(shares)))]


def keys_within(layout: Layout, model_bytes: int) -> dict[str, int]:
    """Returns the max number of keys of each key space whose sub-model fits into `model_bytes`.

    With several key spaces each gets the same share of its keys, as large as fits.

    Args:
        layout: the model and its cuts.
        model_bytes: what a device can hold.

    Raises:
        InputError: even the part that everybody receives, with one key of each space, is larger.

    >>> from keyhole.primitives.layout import Cut
    >>> from keyhole.primitives.keyspace import KeySpace
    >>> word = KeySpace("word", 1000)
    >>> layout = Layout.of({"w": np.zeros((1000, 10), np.float32)}, Cut(word, {"w": 0}))
    >>> keys_within(layout, model_bytes=4100)
    {'word': 102}
    """
    largest = max((space.num_keys for space in layout.spaces), default=1)

    def counts(step: int) -> dict[str, int]:
        return {s.name: max(1, s.num_keys * step // largest) for s in layout.spaces}

    if layout.client_bytes(**counts(1)) > model_bytes:
        raise InputError(
            f"the smallest sub-model does not fit the device: got {model_bytes} bytes; expected "
            f"{layout.client_bytes(**counts(1))} or more; cut more of the model, or leave such "
            "devices out"
        )
    low, high = 1, largest
    while low < high:  # the largest step that fits
        middle = (low + high + 1) // 2
        if layout.client_bytes(**counts(middle)) <= model_bytes:
            low = middle
        else:
            high = middle - 1
    return counts(low)


def share_of_keys(spaces: Iterable[KeySpace], alpha: float) -> dict[str, int]:
    """Returns m = alpha K for each key space, rounded, and at least 1.

    The paper's three kinds of run differ in the spaces that alpha applies to; with alpha = 1 all
    are training without select:

    - structured: `share_of_keys(spaces, 1) | share_of_keys([word], alpha)`
    - random: `share_of_keys(spaces, 1) | share_of_keys([neuron], alpha)`
    - mixed: `share_of_keys(spaces, alpha)`

    each with `choose_with({"word": top, "neuron": independent}, count_keys)`.

    Args:
        spaces: such as the spaces of a layout.
        alpha: above 0, at most 1.

    Returns:
        Key space -> keys per client, as `RunParts` takes it.

    Raises:
        InputError: alpha is out of range.

    >>> word, neuron = KeySpace("word", 10_000), KeySpace("neuron", 2048)
    >>> share_of_keys([word, neuron], 0.1)
    {'word': 1000, 'neuron': 205}
    """
    if not 0 < alpha <= 1:
        raise InputError(
            f"share of keys is out of range: got {alpha}; expected above 0, at most 1; 1 selects "
            "all keys"
        )
    return {space.name: max(1, round(alpha * space.num_keys)) for space in spaces}
