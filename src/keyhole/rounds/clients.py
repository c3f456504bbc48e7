"""Describes clients: their data, how they choose keys and train, and their work in one round."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, overload

import numpy as np

from keyhole.arrays import Tree
from keyhole.errors import InputError, NoExamplesError
from keyhole.keys.budget import DeviceClass, assign_device, keys_within
from keyhole.keys.choice import ClientContext
from keyhole.parts import running
from keyhole.primitives.keyspace import Keys
from keyhole.primitives.layout import ClientKeys, KeysBySpace, Layout, RowSource
from keyhole.sampling import Stream, generator
from keyhole.server.inputs import UNBOUND, InputBound


class ClientUpdateFn(Protocol):
    """Any `(slices, data, rng) -> update` on NumPy arrays, in whatever framework.

    The update is start minus end, shaped as the slices. All randomness comes from `rng`, which is a
    function of (seed, round, client).
    """

    def __call__(self, slices: Tree, data: Any, rng: np.random.Generator, /) -> Tree:
        """Trains on `data` from `slices` on."""
        ...


def _as_they_are(data: Any, _: KeysBySpace) -> Any:
    return data


@dataclass(frozen=True)
class Clients:
    """The population: its data, how a client chooses keys, and how it trains.

    Args:
        count: how many there are; they are numbered from 0.
        data: `client -> its data`; may load it from disk.
        choose: `(data, context) -> keys`: one `Keys`, or several in a list or by the name of their
            key space. `context.max_keys` has the most of each; see `ClientContext`.
        train: `(sub-model, data, rng) -> update`, start minus end, shaped as the sub-model.
        localize: `(data, keys) -> data` in which keys are counted among the client's own, as the
            sub-model has them; `keys` are by the name of their key space. Data that name no keys
            stay as they are.
    """

    count: int
    data: Callable[[int], Any]
    choose: Callable[[Any, ClientContext], ClientKeys]
    train: ClientUpdateFn
    localize: Callable[[Any, KeysBySpace], Any] = _as_they_are


class KeyRules(Protocol):
    """What decides a client's keys besides its data; a run has it, and so has what devices are told
    of a run."""

    @property
    def seed(self) -> int:
        """Of everything random."""
        ...

    @property
    def trial(self) -> int:
        """Which repetition."""
        ...

    @property
    def keys_per_client(self) -> Mapping[str, int]:
        """Key space -> max keys of a client."""
        ...

    @property
    def devices(self) -> Sequence[DeviceClass]:
        """Kinds of device; none bounds nothing."""
        ...

    @property
    def shared_keys(self) -> bool:
        """Whether all clients of a round draw from the same random numbers."""
        ...


_WHO = " of client {} in round {}"


def choose_keys(
    client: int, t: int, layout: Layout, clients: Clients, run: KeyRules
) -> KeysBySpace:
    """Returns what a client chooses in round t, within its budget."""
    limit, path, device = dict(run.keys_per_client), (run.seed, run.trial), None
    if run.devices:
        device = assign_device(run.devices, generator(*path, Stream.DEVICE, client))
        fits = keys_within(layout, device.model_bytes)
        limit = {name: min(m, fits[name]) for name, m in limit.items()}
    draw = (Stream.ROUND_KEYS, t) if run.shared_keys else (Stream.KEYS, t, client)
    context = ClientContext(limit, generator(*path, *draw), t, client, device)
    with running("choose", _WHO, client, t):
        chosen = clients.choose(clients.data(client), context)
    _check_chosen(chosen)
    keys = layout.keys_by_space(chosen)
    for name, z in keys.items():
        if len(z) > limit[name]:
            raise InputError(
                f"a client chose more keys of {name!r} than it may hold: got {len(z)}; expected "
                f"{limit[name]} or fewer; let choose return at most context.max_keys of them"
            )
    return keys


def _check_chosen(keys: object) -> None:
    """Raises InputError unless `choose` has returned keys of key spaces."""
    held = list(keys.values()) if isinstance(keys, Mapping) else keys
    given = [keys] if isinstance(keys, Keys) else held
    if not isinstance(given, list | tuple) or not all(isinstance(z, Keys) for z in given):
        raise InputError(
            f"choose has returned what are no keys: got a {type(keys).__name__}; expected Keys, or "
            "a list or dict of them with one for each key space; return space.keys(numbers), with "
            "the KeySpace of the model's cut"
        )


def choose_all(
    clients: Clients, asked: Sequence[int], t: int, layout: Layout, run: KeyRules
) -> list[KeysBySpace]:
    """Returns what each of some clients chooses in round t, in order; see `choose_keys`."""
    return [choose_keys(client, t, layout, clients, run) for client in asked]


def check_keys_per_client(layout: Layout, keys_per_client: Mapping[str, int]) -> None:
    """Raises InputError unless there is a number for each key space, within what it has."""
    sizes = {space.name: space.num_keys for space in layout.spaces}
    if keys_per_client.keys() != sizes.keys():
        raise InputError(
            "keys_per_client does not match the cuts: got "
            f"{', '.join(sorted(keys_per_client)) or 'none'}; expected "
            f"{', '.join(sorted(sizes)) or 'none'}; give one number for each key space"
        )
    for name, m in keys_per_client.items():
        if m > sizes[name]:
            raise InputError(
                f"keys_per_client of {name!r} is out of range: got {m}; expected 0..{sizes[name]}; "
                "a client cannot select more keys than there are: lower --m, or its count in `keys`"
            )


NOTHING: Tree = {}
"""What a client without examples brings: no leaves. It passes through all that carries updates."""


def is_nothing(update: Tree) -> bool:
    """Whether a client has brought `NOTHING`; None is an update that cannot be used."""
    return isinstance(update, dict) and not update


@dataclass(frozen=True)
class ClientJob:
    """One client's training in one round: all that a worker needs besides `Clients`.

    `bound` is what an honest client clips its update to.
    """

    client: int
    seed_path: tuple[int, ...]
    keys: KeysBySpace
    submodel: Tree
    bound: InputBound = UNBOUND

    def run(self, clients: Clients) -> Tree:
        """Returns the update; `NOTHING` where the client has no examples."""
        try:
            return self.train(clients)
        except NoExamplesError:
            return NOTHING

    def train(self, clients: Clients) -> Tree:
        """Returns the update, clipped, a function of the job and the client's data alone; raises
        NoExamplesError where the client has no examples.
        """
        with running("train", _WHO, self.client, self.seed_path[-2]):
            data = clients.localize(clients.data(self.client), self.keys)
            update = clients.train(self.submodel, data, generator(*self.seed_path))
        return self.bound.clip(update, self.keys)

    @staticmethod
    def of(
        seed: int,
        trial: int,
        t: int,
        client: int,
        keys: KeysBySpace,
        submodel: Tree,
        bound: InputBound = UNBOUND,
    ) -> ClientJob:
        """The job of a client in round t; its randomness is the client's in that round."""
        return ClientJob(client, (seed, trial, Stream.CLIENT, t, client), keys, submodel, bound)


class Jobs(Sequence[ClientJob]):
    """The jobs of some clients of one round: sub-models come one by one, as jobs are taken.

    `seed_path` is seed, trial and round; `keys` has what a client's sub-model holds, in the order
    of the jobs; `source` is that of the rows, where they can be selected elsewhere; `bound` holds
    for every update.
    """

    def __init__(
        self,
        seed_path: tuple[int, int, int],
        keys: Mapping[int, KeysBySpace],
        submodel: Callable[[int], Tree],
        source: RowSource | None = None,
        bound: InputBound = UNBOUND,
    ) -> None:
        self.seed_path = seed_path
        self.keys = keys
        self.source = source
        self.bound = bound
        self._submodel = submodel
        self._clients = list(keys)

    @overload
    def __getitem__(self, at: int) -> ClientJob: ...
    @overload
    def __getitem__(self, at: slice) -> list[ClientJob]: ...
    def __getitem__(self, at: int | slice) -> ClientJob | list[ClientJob]:
        if isinstance(at, slice):
            return [self[place] for place in range(len(self))[at]]
        client = self._clients[at]
        submodel = self._submodel(client)
        return ClientJob.of(*self.seed_path, client, self.keys[client], submodel, self.bound)

    def __len__(self) -> int:
        return len(self._clients)
