"""Clients: what the simulator knows of the devices of a run, and how they choose keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from keyhole.errors import InputError
from keyhole.keys.budget import DeviceClass, assign_device, keys_within
from keyhole.primitives.layout import ClientKeys, Layout
from keyhole.training.client_update import ClientUpdateFn
from keyhole.training.randomness import Place, generator

__all__ = ["Choosing", "Clients", "check_keys_per_client", "choose_all", "choose_keys"]


def _as_they_are(data: Any, _: ClientKeys) -> Any:
    return data


@dataclass(frozen=True)
class Clients:
    """The population: its data, how a client chooses keys, and how it trains.

    Args:
        count: how many there are; they are numbered from 0.
        data: `client -> its data`; may load it from disk.
        choose: `(data, most keys of each key space, rng) -> keys`.
        train: `(sub-model, data, rng) -> update`, start minus end, shaped as the sub-model.
        localize: `(data, keys) -> data` in which keys are counted among the client's own, as the
            sub-model has them; data that name no keys stay as they are.
    """

    count: int
    data: Callable[[int], Any]
    choose: Callable[[Any, Mapping[str, int], np.random.Generator], ClientKeys]
    train: ClientUpdateFn
    localize: Callable[[Any, ClientKeys], Any] = _as_they_are


@dataclass(frozen=True)
class Choosing:
    """What decides a client's keys besides its data: the part of a plan that clients are told.

    Args:
        seed: of everything random.
        trial: which repetition.
        keys_per_client: key space -> most keys of a client.
        devices: kinds of device; none bounds nothing.
        shared_keys: whether all clients of a round draw the same random numbers.
    """

    seed: int
    trial: int
    keys_per_client: Mapping[str, int]
    devices: Sequence[DeviceClass] = ()
    shared_keys: bool = False


def choose_keys(
    client: int, t: int, layout: Layout, clients: Clients, choosing: Choosing
) -> ClientKeys:
    """What a client chooses in round t, within its budget.

    Raises:
        InputError: it chose more keys than it may hold.
    """
    most = dict(choosing.keys_per_client)
    run = choosing.seed, choosing.trial
    if choosing.devices:
        device = assign_device(choosing.devices, generator(*run, Place.DEVICE, client))
        fits = keys_within(layout, device.model_bytes)
        most = {name: min(m, fits[name]) for name, m in most.items()}
    place = (Place.ROUND_KEYS, t) if choosing.shared_keys else (Place.KEYS, t, client)
    keys = clients.choose(clients.data(client), most, generator(*run, *place))
    for name, z in layout.keys_by_space(keys).items():
        if len(z) > most[name]:
            raise InputError(
                f"a client chose more keys of {name!r} than it may hold",
                got=len(z),
                allowed=f"{most[name]} or fewer",
                fix="let choose return at most the number it is given",
            )
    return keys


def choose_all(
    clients: Clients, asked: Sequence[int], t: int, layout: Layout, choosing: Choosing
) -> list[ClientKeys]:
    """What each of some clients chooses in round t, in order; see `choose_keys`."""
    return [choose_keys(client, t, layout, clients, choosing) for client in asked]


def check_keys_per_client(layout: Layout, keys_per_client: Mapping[str, int]) -> None:
    """Raises InputError unless there is a number for each key space, within what it has."""
    sizes = {space.name: space.num_keys for space in layout.spaces}
    if keys_per_client.keys() != sizes.keys():
        raise InputError(
            "keys_per_client does not match the cuts",
            got=", ".join(sorted(keys_per_client)) or "none",
            allowed=", ".join(sorted(sizes)) or "none",
            fix="give one number for each key space",
        )
    for name, m in keys_per_client.items():
        if m > sizes[name]:
            raise InputError(
                f"keys_per_client of {name!r} is out of range",
                got=m,
                allowed=f"0..{sizes[name]}",
                fix="a client cannot select more keys than there are",
            )
