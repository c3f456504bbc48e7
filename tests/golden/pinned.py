"""Runs a case of the pinned results and tells its model and its numbers in words of our own.

This module alone knows how the library is called: a case is plain data, and what comes back has
names that do not follow the library's. A rename in src changes this file and no result.
"""

import json
import threading
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from keyhole import tree
from keyhole.data.open import make_synthetic
from keyhole.delivery import delivery_named
from keyhole.delivery.pir.one_server import OneServerPir
from keyhole.delivery.records import Coding
from keyhole.delivery.relay.ohttp import GatewayKey
from keyhole.device.private import QueryFetch
from keyhole.device.relayed import RelayedFetch
from keyhole.device.sums import SumPolicy, SumSend
from keyhole.device.take_part import PopulationClient, fetch_at_home, keep_taking_part
from keyhole.experiments import task_named
from keyhole.experiments.experiment import Experiment, hold_here
from keyhole.experiments.specs import spec_of
from keyhole.experiments.sweeps import demo_arms, demo_data
from keyhole.keys.budget import DeviceClass
from keyhole.rounds.cores import Cores
from keyhole.rounds.loop import Evaluation, start_run
from keyhole.rounds.machine import Buffering, exponential
from keyhole.rounds.round import in_process
from keyhole.service.gateway import gateway_routes
from keyhole.service.inbox import SpoolInbox
from keyhole.service.relay import Mix, RelayApp
from keyhole.service.served import Served
from keyhole.service.sum_services import SumServices
from keyhole.service.transport import serving
from keyhole.wire.assignment import device_name
from keyhole.wire.sockets import Clock
from tests.service.living_devices import living
from tests.service.pir.pair import ONE, TWO, pair
from tests.service.relay.relayed import line_to
from tests.service.small_service import small_service
from tests.service.sums.aggregators import aggregators

ROUNDS = 2
SEED = 7
DEMO = "demo"

# What decides the work of a case's clients, and not how slices and updates travel.
FIELDS = {
    "mean over": "mean_over",
    "negatives": "client.negatives",
    "delivery": "delivery",
    "aggregation": "aggregation.name",
    "value clip": "aggregation.value_clip",
    "ring bits": "aggregation.ring_bits",
    "signed": "aggregation.signed",
    "sampling": "cohort.sampling",
    "over-selection": "cohort.over_selection",
    "min updates": "cohort.min_updates",
    "privacy": "privacy",
    "tuning": "tuning",
}
"""What a case says -> the field of the record."""
TRAINING = {
    "algorithm": "client.algorithm",
    "client_lr": "client.lr",
    "server_lr": "server.lr",
    "eps": "server.eps",
    "batch_size": "client.batch_size",
    "max_examples": "client.max_examples",
    "min_examples": "client.min_examples",
    "cohort": "cohort.size",
}
"""The same, of what `training` says."""
AT_WORK = ("task", "line", "data", "sizes", "keys", "m", "training", "negatives", "tuning")
# Our word -> the record's, where a client's part did not end with an update that was added.
OUTCOMES = {
    "lost before slices": "lost_before",
    "lost after slices": "lost_after",
    "late": "late",
    "refused": "refused",
    "stale": "stale",
}
# Our word -> the record's, for numbers that are kept as they are.
NUMBERS = {
    "round": "round",
    "step": "step",
    "clients": "clients",
    "closed": "closed",
    "bytes down": "bytes_down",
    "bytes up": "bytes_up",
    "client sizes": "client_sizes",
    "select calls": "select_calls",
    "cache hits": "cache_hits",
    "distinct keys": "distinct_keys",
    "unplaced keys": "unplaced_keys",
    "staleness": "staleness",
    "metrics": "metrics",
}


def run_case(case, directory):
    """Returns the digest of the model, the metrics on the test split, and the rounds of a case.

    Args:
        case: task -> its name; the other entries are read in `_experiment`, `_plan` and `_place`.
        directory: an empty one, for what has to be in files.
    """
    at_work = _at_work(case)
    plan = _plan(_experiment(case), case)
    clients = _clients(at_work, case)
    with _place(case, clients, directory) as place:
        state = at_work.start(plan.trial, None, hold=place.hold).state
        run = start_run(state, clients, plan, place.directory, place.kind)
        splits = at_work.task.metrics
        curve = Evaluation(splits.get("validation", splits["test"]))
        records = list(run.rounds(ROUNDS, execute=place.execute, evaluation=curve))
        run.close()
        rounds = [_numbers(record) for record in records]
        if case.get("secret noise"):
            return {"rounds": [{n: each[n] for n in each if n != "metrics"} for each in rounds]}
        return {
            "model": _digest(run.state.model()),
            "test": Evaluation(splits["test"]).of(run.state),
            "rounds": rounds,
        }


@dataclass
class Place:
    """Where a case runs: what makes its rounds, trains clients and holds the state, and where the
    run is kept."""

    kind: Any = None
    execute: Any = in_process
    hold: Any = hold_here
    directory: Path | None = None


def _digest(model):
    """The sha256 of all parameters: path, dtype, shape and bytes of each, in order of the paths."""
    found = sha256()
    leaves = {path: np.asarray(leaf) for path, leaf in tree.flatten(model).items()}
    for path, leaf in sorted(leaves.items()):
        found.update(f"{path} {leaf.dtype.str} {leaf.shape}\n".encode())
        found.update(np.ascontiguousarray(leaf).tobytes())
    return found.hexdigest()


def _numbers(record):
    """The numbers of a round, in our words."""
    told = {ours: _plain(getattr(record, theirs)) for ours, theirs in NUMBERS.items()}
    ended = {c: ours for ours, theirs in OUTCOMES.items() for c in getattr(record, theirs)}
    told["outcomes"] = [ended.get(client, "added") for client in record.clients]
    told["opened"] = record.not_opened is None
    if record.privacy:
        told["epsilon"] = record.privacy["epsilon"]
        told["delta"] = record.privacy["delta"]
    return told


def _plain(value):
    """The value as JSON gives it back."""
    if isinstance(value, dict):
        return {str(name): _plain(inner) for name, inner in value.items()}
    return list(value) if isinstance(value, list | tuple) else value


@cache
def _data(task, sizes):
    """Small data for a task; cases share it."""
    return make_synthetic(task_named(task).kind, SEED, **dict(sizes))


def _at_work(case):
    """The experiment that trains and evaluates: the same for all cases whose clients do the same,
    so that JAX compiles their work once."""
    told = {name: case[name] for name in AT_WORK if name in case}
    return _kept_experiment(json.dumps(told, sort_keys=True))


@cache
def _kept_experiment(told):
    return _experiment(json.loads(told))


def _experiment(case):
    """The experiment: task, `data` and `sizes`, `keys` and `m`, `training`, and how slices and
    updates travel."""
    task = case["task"]
    if task == DEMO:
        return Experiment(demo_arms(ROUNDS, SEED)[case["line"]], demo_data(SEED))
    changes = {"rounds": ROUNDS, "evaluate_every": 1, "seed": SEED, "sizes": case["sizes"]}
    changes |= {path: case[name] for name, path in FIELDS.items() if case.get(name) is not None}
    changes |= {TRAINING.get(name, name): value for name, value in case.get("training", {}).items()}
    for space in task_named(task).defaults.keys:
        changes[f"keys.{space}.shared"] = case.get("shared keys", False)
    changes |= {f"keys.{space}.choice": choice for space, choice in case.get("keys", {}).items()}
    changes |= {f"keys.{space}.count": m for space, m in case.get("m", {}).items()}
    if "asynchronous" in case:
        changes["asynchronous.concurrency"] = case["asynchronous"]["concurrency"]
    spec, data = spec_of(task, changes), _data(task, tuple(sorted(case["data"].items())))
    return Experiment(spec, data, allow_simulation=True)


def _clients(experiment, case):
    """The clients; with `grid`, numbers of their updates are multiples of one over it, which no
    secure sum rounds: devices round with random numbers that nobody else knows."""
    clients, grid = experiment.clients, case.get("grid")
    if grid is None:
        return clients

    def train(submodel, data, rng):
        report = clients.train(submodel, data, rng)
        return tree.map_leaves(lambda leaf: np.round(np.asarray(leaf) * grid) / grid, report.update)

    return replace(clients, train=train)


def _plan(experiment, case):
    """The plan: what `keyhole train` makes of the case, and what only callers in Python can ask
    for."""
    plan = experiment.run_parts(case.get("trial", 0))
    lost = {name: case[f"lost {name}"] for name in ("before", "after") if f"lost {name}" in case}
    cohorts = replace(plan.cohorts, **{f"lost_{name}": share for name, share in lost.items()})
    plan = replace(plan, cohorts=cohorts)
    if "coding" in case:
        plan = replace(plan, delivery=replace(plan.delivery, coding=Coding(case["coding"])))
    if "devices" in case:
        plan = replace(plan, devices=tuple(DeviceClass(*each) for each in case["devices"]))
    if "asynchronous" in case:
        stream = case["asynchronous"]
        numbers = stream["concurrency"], stream["goal"], stream.get("max staleness", 20)
        plan = replace(plan, buffering=Buffering(*numbers, duration=exponential))
    return plan


@contextmanager
def _place(case, clients, directory):
    """Yields the place that the case names, for as long as it runs."""
    name = case.get("place", "process")
    with ExitStack() as stack:
        if name == "process":
            yield Place()
        elif name == "disk":
            yield Place(directory=directory / "run")
        elif name == "threads":
            yield Place(execute=Cores(2))
        elif name.startswith("ray"):
            yield stack.enter_context(_ray(case, "shards" in name))
        else:
            yield Place(kind=stack.enter_context(SERVED[name](case, clients, directory)))


@contextmanager
def _ray(case, has_shards):
    from keyhole.engines.ray.engine import Population, RayEngine
    from keyhole.engines.ray.shards import Shards

    with (
        RayEngine(Population(_at_work(case).spec, None, case["data"]), 2) as engine,
        ExitStack() as more,
    ):
        hold = more.enter_context(Shards(2)).hold if has_shards else hold_here
        yield Place(execute=engine, hold=hold)


@contextmanager
def _devices(service, clients, fetch_of=None, send_of=None):
    """A device in a thread for each client; they take part until the block ends.

    Args:
        service: that they ask.
        clients: the population.
        fetch_of: `stack -> how one fetches`; None fetches by keys in the clear.
        send_of: `(name, stack) -> how it sends`; None sends to the service.
    """
    stop = threading.Event()

    def live(client):
        name = device_name(client)
        one = PopulationClient(client, lambda settings: clients, (SEED, 0))
        clock = Clock(sleep=lambda seconds: stop.wait(min(seconds, 0.01)))
        with ExitStack() as stack:
            how = {} if fetch_of is None else {"fetch": fetch_of(stack)}
            how |= {} if send_of is None else {"send": send_of(name, stack)}
            own = {"stop": stop, "clock": clock, "trainer_key": service.trainer.public}
            device = stack.enter_context(service.device(name=name, **own))
            keep_taking_part(device, one.participant(**how))

    with living(live, range(clients.count), stop):
        yield


def _rounds(service, case, inbox=None, **more):
    """Rounds of devices; they answer long before the deadline, which is for a device that fails."""
    coding = Coding(case.get("coding", "plain"))
    inbox = inbox or SpoolInbox(service.spool)
    more = {"seconds": 120.0, "poll": 0.005, **more}
    return Served(service.publisher, inbox, coding=coding, named=True, **more)


@contextmanager
def _by_keys(case, clients, directory):
    with small_service(directory) as service, _devices(service, clients):
        yield _rounds(service, case)


@contextmanager
def _whole_rounds(case, clients, directory):
    fetch = lambda stack: fetch_at_home  # noqa: E731
    with small_service(directory) as service, _devices(service, clients, fetch):
        yield _rounds(service, case, fetched=delivery_named("broadcast"))


@contextmanager
def _two_servers(case, clients, directory):
    def fetch(stack):
        made = both.fetch()
        stack.callback(made.others[0].close)
        return made

    with pair(directory, TWO) as both, _devices(both.service, clients, fetch):
        yield _rounds(both.service, case, fetched=delivery_named("pir"))


@contextmanager
def _one_server(case, clients, directory):
    fetch = lambda stack: QueryFetch(OneServerPir())  # noqa: E731
    with pair(directory, ONE) as both, _devices(both.service, clients, fetch):
        yield _rounds(both.service, case, fetched=delivery_named("pir-one-server"))


@contextmanager
def _behind_a_relay(case, clients, directory):
    key = GatewayKey.fresh()

    def fetch(stack):
        relay = stack.enter_context(service.device(url, token=None))
        return RelayedFetch(relay.client)

    def extra(rounds):
        return [gateway_routes(rounds, [key])]

    with small_service(directory, extra=extra) as service, ExitStack() as stack:
        app = RelayApp(line_to(stack, service.url), mix=Mix(seconds=0.0))
        url = stack.enter_context(serving(app))
        stack.enter_context(_devices(service, clients, fetch))
        yield _rounds(service, case, fetched=delivery_named("relay"))


@contextmanager
def _to_aggregators(case, clients, directory):
    def send(name, stack):
        lines = [stack.enter_context(sums.device(party, name)) for party in (0, 1)]
        return SumSend(*lines, (sums.public(0), sums.public(1)), SumPolicy())

    with (
        small_service(directory / "rounds") as service,
        aggregators(directory / "sums") as sums,
        _devices(service, clients, send_of=send),
    ):
        trainers = sums.trainer(0), sums.trainer(1)
        inbox = SumServices(*trainers, salt=bytes(16), stop=threading.Event())
        yield _rounds(service, case, inbox)


SERVED = {
    "service": _by_keys,
    "service, whole rounds": _whole_rounds,
    "service, two servers": _two_servers,
    "service, one server": _one_server,
    "service, relay": _behind_a_relay,
    "service, two aggregators": _to_aggregators,
}
