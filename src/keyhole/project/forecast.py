"""Says what a project's run will cost, and who will learn what, before anything starts."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

from keyhole.aggregation import aggregation_named, aggregation_names
from keyhole.aggregation.base import AggregationAbout, about_of
from keyhole.delivery import delivery_named
from keyhole.delivery.base import Delivery
from keyhole.delivery.clear import DEFAULT_SERVED
from keyhole.delivery.records import PLAIN, model_bytes, records_of
from keyhole.errors import CostlyError
from keyhole.experiments.experiment import Experiment
from keyhole.experiments.opening import open_data
from keyhole.planner.capacity import price_sums
from keyhole.pricing import Speeds, Workload, measured
from keyhole.primitives.layout import Layout, max_keys_of
from keyhole.project.parties import SECOND, SERVICE, TRAINER, aggregator_name, check_parties
from keyhole.project.spec import Project
from keyhole.rounds.cohorts import CohortSpec
from keyhole.service.sum_services import seen_in_shares


@dataclass(frozen=True)
class Traffic:
    """What one client sends and receives in a round; None for CPU that nobody estimates."""

    bytes_down: int
    bytes_up: int
    server_seconds: float | None


@dataclass(frozen=True)
class Forecast:
    """What is known of a run before it starts.

    Args:
        learned: party -> what it learns of a client's keys, and of its update.
        costs: of each part of a round, and of broadcasting the model.
        select_bytes: what a client receives and sends in a round.
        parameter_bytes: how much of that are parameters.
        broadcast_bytes: what it would receive and send of the whole model.
        notes: what an operator should know.
    """

    task: str
    rounds: int
    cohort: int
    learned: dict[str, dict[str, str]]
    costs: dict[str, Traffic]
    select_bytes: int
    parameter_bytes: int
    broadcast_bytes: int
    notes: list[str]


def forecast_of(project: Project) -> Forecast:
    """Returns the forecast; raises InputError where the run or its parties cannot be."""
    check_parties(project)
    spec = project.spec
    experiment = Experiment(spec, open_data(spec))
    experiment.check()
    parts, layout = experiment.run_parts(0), experiment.task.model.layout
    limits, cohort = experiment.keys_per_client, parts.cohorts.size
    named = aggregation_names()[0] if spec.aggregation.name is None else spec.aggregation.name.name
    if project.deploy.aggregators:
        (named,) = aggregation_names(lambda about: about.is_shared)
    delivery = delivery_named(spec.delivery.name if spec.delivery else DEFAULT_SERVED)
    notes = _notes(project, delivery.about.is_private, bool(project.deploy.aggregators))
    if project.deploy.is_local:
        notes += _missing_devices(spec.cohort, parts.cohorts.needed, project.deploy.devices)
    try:
        experiment.check_worth()
    except CostlyError as error:
        wants = "" if project.deploy.force else "`keyhole run` wants force = true in [deploy]: "
        notes.append(f"{wants}{error}")
    costs = _costs(delivery, named, layout, limits, cohort)
    *parts_of_round, whole = costs.values()
    return Forecast(
        task=spec.task.name,
        rounds=spec.rounds,
        cohort=cohort,
        learned=_learned(project, delivery, named),
        costs=costs,
        select_bytes=sum(each.bytes_down + each.bytes_up for each in parts_of_round),
        parameter_bytes=2 * model_bytes(layout, records_of(layout, PLAIN), limits),
        broadcast_bytes=whole.bytes_down + whole.bytes_up,
        notes=notes,
    )


def _learned(project: Project, delivery: Delivery, aggregation: str) -> dict[str, dict[str, str]]:
    """Who learns what, by the names of [deploy] and of kits. Updates in the clear reach the
    service, from which the trainer takes them."""
    deploy, about = project.deploy, about_of(aggregation_named(aggregation))
    counts = project.spec.mean_over == "choosers" and not about.is_in_clear
    seen_in_sum = seen_in_shares if deploy.aggregators else AggregationAbout.seen_by
    slices = (SERVICE, SECOND) if deploy.second else (SERVICE,)
    servers = dict(zip(delivery.about.leaks, slices, strict=False))  # others have no kit
    keys = {servers.get(p, p): str(leak) for p, leak in delivery.about.leaks.items()}
    updates = dict[str, str]()
    for place, (party, what) in enumerate(seen_in_sum(about, with_counts=counts).items()):
        if not deploy.aggregators:
            updates |= dict.fromkeys((SERVICE, TRAINER), what)
        else:
            updates[party if party == TRAINER else aggregator_name(place)] = what
    order = dict.fromkeys([*deploy.urls, TRAINER, *keys])
    return {
        party: {"keys": keys.get(party, "nothing"), "updates": updates.get(party, "nothing")}
        for party in order
    }


def _costs(
    delivery: Delivery, aggregation: str, layout: Layout, limits: dict[str, int], cohort: int
) -> dict[str, Traffic]:
    """Of slices and of the update, and of the whole model both ways."""
    loads, shared, whole = list[Workload](), 0, 0
    tables = records_of(layout, PLAIN)
    for part, records, m in zip(layout.parts, tables, max_keys_of(layout, limits), strict=True):
        count, size = part.space.num_keys, records.record_bytes
        whole += count * size
        if 0 < m < count:
            loads.append(Workload(count, m, size, cohort))
        elif m:
            shared += count * size
    slices = [delivery.price(load, measured(Speeds)) for load in loads]
    sums = [each for load in loads for each in price_sums(load) if each.name == aggregation]
    seconds = sum(price.server_seconds for price in slices) / cohort
    adding = sum(sum(each.seconds_by.values()) for each in sums) / cohort
    return {
        f"slices ({delivery.about.name})": Traffic(
            sum(price.bytes_down for price in slices) + shared,
            sum(price.bytes_up for price in slices),
            seconds,
        ),
        f"update ({aggregation})": Traffic(
            sum(each.bytes_down for each in sums),
            sum(each.bytes_up for each in sums) + shared,
            adding,
        ),
        "no select: the whole model": Traffic(whole, whole, None),
    }


def _missing_devices(cohort: CohortSpec, needed: int, devices: int) -> list[str]:
    """What waits for more devices than a try-out has."""
    waits = {"rounds wait": (needed, "size"), "evaluations wait": (cohort.evaluators, "evaluators")}
    if needed and cohort.min_waiting == needed:
        waits["rounds wait"] = (needed, "min_waiting")
    return [
        f"{who} for {count} devices, and a try-out has {devices}: raise devices in [deploy], or "
        f"lower cohort.{name}"
        for who, (count, name) in waits.items()
        if count > devices
    ]


def _notes(project: Project, is_private: bool, is_shared: bool) -> list[str]:
    """What would undo what the operator seems to want."""
    notes = []
    if is_private and not is_shared:
        notes.append(
            "slices are fetched privately and updates are not: an update names the keys again; "
            "add two aggregators"
        )
    if is_shared and not is_private:
        notes.append(
            "updates are added up in secret and slices are fetched in the clear: the slice service "
            "sees the keys; choose a private delivery"
        )
    if project.deploy.store is not None and find_spec("obstore") is None:
        notes.append(
            "store needs a package that is not here: those who run start-push.sh and start-pull.sh "
            "add the extra s3, pip install 'keyhole[s3]'"
        )
    if project.deploy.is_local and (project.deploy.second or is_shared):
        notes.append("both parties of a pair are on one machine here: a try-out, not a protection")
    return notes
