"""Describes clients: their data, how they choose keys and train, and their work in one round."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cached_property
from inspect import signature
from sys import getsizeof
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, overload

from keyhole import tree
from keyhole.arrays import Tree
from keyhole.computing import Steps, complete
from keyhole.errors import InputError, NoExamplesError
from keyhole.keys.budget import DeviceClass, assign_device, keys_within
from keyhole.keys.choice import ClientContext, KeyTable, KeyUsers
from keyhole.parts import running
from keyhole.primitives.keyspace import Keys
from keyhole.primitives.layout import ClientKeys, KeysBySpace, Layout, RowSource
from keyhole.primitives.report import Report, unpack_state
from keyhole.sampling import Stream, generator
from keyhole.server.client_states import MAX_STATE_BYTES, ClientStates
from keyhole.server.frozen import Receipts
from keyhole.server.inputs import UNBOUND, InputBound

if TYPE_CHECKING:
    from keyhole.server.state import ServerState


@dataclass(frozen=True, eq=False)
class TrainContext:
    """What a client knows when it trains, besides slices, data and random numbers: a train function
    that declares a parameter `context` is given it by that name.

    Args:
        client: its number in the population; on a device, the one that its operator gave it.
        round: from 0.
        keys: those that its slices hold, by key space; they may differ from round to round.
        state: what it last reported as `Report.state`, None at first. The arrays are its own.
        frozen: on a device, the model's frozen leaves as they arrived, cut as its slices are; None
            where the model has them.
    """

    client: int
    round: int
    keys: KeysBySpace
    state: Tree | None = None
    frozen: Tree | None = None


ClientUpdateFn: TypeAlias = Callable[..., Any]
"""Any `(slices, data, rng) -> update` on NumPy arrays, in whatever framework.

The update is start minus end, shaped as the slices; a `Report` holds it with more. All randomness
comes from `rng`, which is a function of (seed, round, client). `(slices, data, rng, context)` is
given a `TrainContext`, too."""


def takes_context(train: ClientUpdateFn) -> bool:
    """Whether a train function declares a parameter `context`."""
    try:
        return "context" in signature(train).parameters
    except (TypeError, ValueError):  # of C, without a signature
        return False


def reads_only(train: ClientUpdateFn) -> bool:
    """Whether a train function declares, by an attribute `reads_only`, that it writes nothing into
    its slices: then a client that takes the whole model is lent the server's own rows."""
    return bool(getattr(train, "reads_only", False))


def trains_in_steps(train: ClientUpdateFn) -> Callable[..., Steps[Any]] | None:
    """Returns the method `train_in_steps` that a train function may have: it takes and returns the
    same, and lets each computation run where there is room; see `keyhole.computing`."""
    found: Callable[..., Steps[Any]] | None = getattr(train, "train_in_steps", None)
    return found


def _own(submodel: Tree) -> Tree:
    """A sub-model whose leaves may be written to."""
    return tree.map_leaves(lambda leaf: leaf if leaf.flags.writeable else leaf.copy(), submodel)


def _as_they_are(data: Any, _: KeysBySpace) -> Any:
    return data


@dataclass(frozen=True)
class Clients:
    """The population: its data, how a client chooses keys, and how it trains.

    Args:
        count: how many there are; they are numbered from 0.
        data: `client -> its data`; may load it from disk. A client that chooses keys and trains on
            what was made once must not change it.
        choose: `(data, context) -> keys`: one `Keys`, or several in a list or by the name of their
            key space. `context.max_keys` has the max of each; see `ClientContext`.
        train: `(sub-model, data, rng) -> update`, start minus end, shaped as the sub-model, or a
            `Report` that holds it; it may take a `TrainContext`, too.
        localize: `(data, keys) -> data` in which keys are counted among the client's own, as the
            sub-model has them; `keys` are by the name of their key space. Data that name no keys
            stay as they are.
        states: what clients keep between rounds; a run has its own.
        max_state_bytes: that one client may keep.
        users: how many clients have each key, for choices that need it; None where clients know
            their own data alone.
        frozen: leaves of the model that are not trained, and who has received them; a run has its
            own. None where there are none.
        measure: `(sub-model, examples as localize returns them) -> {name: value}`, for rounds in
            which clients measure the model; None measures nothing.
        held: `client -> data` to measure on, which it does not train on; None for its data.
    """

    count: int
    data: Callable[[int], Any]
    choose: Callable[[Any, ClientContext], ClientKeys]
    train: ClientUpdateFn
    localize: Callable[[Any, KeysBySpace], Any] = _as_they_are
    states: ClientStates = field(default_factory=ClientStates, compare=False)
    max_state_bytes: int = MAX_STATE_BYTES
    users: KeyUsers | None = None
    measure: Callable[[Tree, Any], Mapping[str, float]] | None = None
    held: Callable[[int], Any] | None = None
    frozen: Receipts | None = field(default=None, compare=False)

    @property
    def frozen_state(self) -> ServerState | None:
        """Leaves that are not trained, as tables to be published."""
        return None if self.frozen is None else self.frozen.leaves.state

    @cached_property
    def wants_context(self) -> bool:
        """Whether `train` declares a parameter `context`."""
        return takes_context(self.train)


_MAX_HELD = 32 << 20  # bytes of data that wait for their clients to train


class DataOnce:
    """Makes a client's data once in a round, where it both chooses and trains in this process.

    Data wait from the one to the other; beyond some megabytes they are made again.
    """

    def __init__(self, clients: Clients) -> None:
        self._data = clients.data
        self._held: dict[int, Any] = {}
        self._left = _MAX_HELD
        self.choosing = replace(clients, data=self._make)
        self.training = replace(clients, data=self._take)

    def _make(self, client: int) -> Any:
        data = self._data(client)
        self._left -= bytes_in(data)
        if self._left > 0:
            self._held[client] = data
        return data

    def _take(self, client: int) -> Any:
        return self._held.pop(client) if client in self._held else self._data(client)


def bytes_in(data: Any) -> int:
    """Returns how many bytes arrays take, in dicts, lists and dataclasses too."""
    if hasattr(data, "nbytes"):
        return int(data.nbytes)
    if isinstance(data, Mapping):
        return sum(map(bytes_in, data.values()))
    if isinstance(data, list | tuple):
        return sum(map(bytes_in, data))
    if is_dataclass(data):
        return sum(bytes_in(getattr(data, field.name)) for field in fields(data))
    return getsizeof(data)


class KeyRules(Protocol):
    """What decides a client's keys besides its data; a run has it, and so has what devices are told
    of a run."""

    @property
    def seed(self) -> int:
        """Seed for all randomness."""
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

    @property
    def norms(self) -> Mapping[str, KeyTable] | None:
        """Key space -> norms of last updates; None where none are kept."""
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
    about = t, client, device, run.norms, clients.users
    context = ClientContext(limit, generator(*path, *draw), *about)
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
                "a client cannot select more keys than there are: lower m (--m), or count in "
                f"[keys.{name}]"
            )


NOTHING: Tree = {}
"""What a client without examples brings: no leaves. It passes through all that carries updates."""


def is_nothing(update: Tree) -> bool:
    """Whether a client has brought `NOTHING`."""
    return isinstance(update, dict) and not update


@dataclass(frozen=True)
class ClientJob:
    """One client's training in one round: all that a worker needs besides `Clients`.

    `bound` is what an honest client clips its update to, and how it weighs it. `state` is what the
    client keeps between rounds, packed; `frozen` is what `TrainContext` tells of frozen leaves.
    """

    client: int
    seed_path: tuple[int, ...]
    keys: KeysBySpace
    submodel: Tree
    bound: InputBound = UNBOUND
    state: bytes | None = None
    frozen: Tree | None = None

    def run(self, clients: Clients) -> Report:
        """Returns what the client reports, its update clipped and weighted and its state packed: a
        function of the job and the client's data alone; the update `NOTHING` where it has no
        examples."""
        return complete(self.run_in_steps(clients))

    def run_in_steps(self, clients: Clients) -> Steps[Report]:
        """Does the same in the steps of `clients.train`, if it has some."""
        try:
            report = yield from self._train(clients)
        except NoExamplesError:
            return Report(NOTHING)
        return self.bound.ready(report, self.keys, self._who)

    def brought(self, clients: Clients) -> Report:
        """Returns the report before its update is clipped and weighted; where updates are weighted
        and the client tells no weight, its examples are counted.

        Raises:
            NoExamplesError: the client has none.
        """
        return complete(self._train(clients))

    def _train(self, clients: Clients) -> Steps[Report]:
        """Trains, in steps where the trainer knows them; returns what `brought` does."""
        given = {}
        with running("train", _WHO, self.client, self.seed_path[-2]):
            data = self._localized(clients)
            if clients.wants_context:
                held = None if self.state is None else unpack_state(self.state, self._who)
                place = self.client, self.seed_path[-2]
                given["context"] = TrainContext(*place, self.keys, held, self.frozen)
            slices = self.submodel if reads_only(clients.train) else _own(self.submodel)
            rng = generator(*self.seed_path)
            in_steps = trains_in_steps(clients.train)
            if in_steps is None:
                found = clients.train(slices, data, rng, **given)
            else:
                found = yield from in_steps(slices, data, rng, **given)
        report = Report.of(found).checked(self._who, clients.max_state_bytes)
        if report.update is None:
            raise InputError(
                f"train of {self._who} has returned no update: got None; expected start minus end, "
                "shaped as the sub-model; return it, or raise NoExamplesError for a client that "
                "has nothing to train on"
            )
        is_counted = self.bound.max_weight is not None and report.weight is None
        return replace(report, weight=_weight_of(data)) if is_counted else report

    def _localized(self, clients: Clients) -> Any:
        """The client's data, as its keys number them; an error of them names the client."""
        try:
            return clients.localize(clients.data(self.client), self.keys)
        except InputError as error:
            if type(error) is InputError:
                error.args = (f"{self._who}: {error}",)
            raise

    @property
    def _who(self) -> str:
        return f"client {self.client} in round {self.seed_path[-2]}"

    @staticmethod
    def of(
        seed: int,
        trial: int,
        t: int,
        client: int,
        keys: KeysBySpace,
        submodel: Tree,
        bound: InputBound = UNBOUND,
        state: bytes | None = None,
        frozen: Tree | None = None,
    ) -> ClientJob:
        """The job of a client in round t; its randomness is the client's in that round."""
        path = (seed, trial, Stream.CLIENT, t, client)
        return ClientJob(client, path, keys, submodel, bound, state, frozen)


def _weight_of(data: Any) -> float | None:
    count = count_examples(data)
    return None if count is None else float(count)


def count_examples(data: Any) -> int | None:
    """Returns how many examples a client's data hold, where they are named arrays or a list."""
    held = list(data.values()) if isinstance(data, Mapping) else [data]
    counts = {len(column) for column in held if hasattr(column, "__len__")}
    return counts.pop() if len(counts) == 1 else None


class Jobs(Sequence[ClientJob]):
    """The jobs of some clients of one round: sub-models come one by one, as jobs are taken.

    `seed_path` is seed, trial and round; `keys` has what a client's sub-model holds, in the order
    of the jobs; `source` is that of the rows, where they can be selected elsewhere; `bound` holds
    for every update; `states` returns what a client keeps between rounds.
    """

    def __init__(
        self,
        seed_path: tuple[int, int, int],
        keys: Mapping[int, KeysBySpace],
        submodel: Callable[[int], Tree],
        source: RowSource | None = None,
        bound: InputBound = UNBOUND,
        states: Callable[[int], bytes | None] = lambda _: None,
    ) -> None:
        self.seed_path = seed_path
        self.keys = keys
        self.source = source
        self.bound = bound
        self.states = states
        self._submodel = submodel
        self._clients = list(keys)

    @overload
    def __getitem__(self, at: int) -> ClientJob: ...
    @overload
    def __getitem__(self, at: slice) -> Jobs: ...
    def __getitem__(self, at: int | slice) -> ClientJob | Jobs:
        if isinstance(at, slice):
            some = {client: self.keys[client] for client in self._clients[at]}
            held = self._submodel, self.source, self.bound, self.states
            return Jobs(self.seed_path, some, *held)
        client = self._clients[at]
        keys, submodel = self.keys[client], self._submodel(client)
        state = self.states(client)
        return ClientJob.of(*self.seed_path, client, keys, submodel, self.bound, state)

    def __len__(self) -> int:
        return len(self._clients)
