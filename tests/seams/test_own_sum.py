"""An own sum of shares: in process, killed, by name, and with devices and two aggregators."""

import json
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from keyhole.aggregation import aggregation_named, aggregation_names
from keyhole.aggregation.base import Aggregation
from keyhole.aggregation.privacy.mechanism import Privacy
from keyhole.cli.main import keyhole
from keyhole.errors import InputError, MalformedError
from keyhole.planner.capacity import price_sums
from keyhole.pricing import Workload
from keyhole.rounds.loop import resume_run, start_run
from keyhole.service.sum_services import AggregatorClient, SumServices
from keyhole.wire.http import HttpClient
from tests.helpers import ROOT
from tests.rounds import toy
from tests.seams.halves import HALVES, Halves
from tests.seams.killed import KILLED_IN, ROUNDS, deadly
from tests.service.small_service import small_service
from tests.service.sums import private_run
from tests.service.sums.aggregators import aggregators
from tests.service.sums.private_run import devices, make_plan, make_state, model_bytes, served

NAME = "tests.seams.halves:HALVES"


def die_in_the_third_round(directory):
    run = []
    clients = deadly(toy.make_clients(), run)
    plan = toy.make_plan(aggregate=HALVES)
    run.append(start_run(toy.make_state(), clients, plan, Path(directory)))
    list(run[0].rounds(ROUNDS))


@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_same_bytes_and_with_no_other_sum(tmp_path):
    command = [sys.executable, "-m", "tests.seams.test_own_sum", str(tmp_path)]
    assert subprocess.run(command, check=False, cwd=ROOT).returncode == -9
    plan = toy.make_plan(aggregate=HALVES)
    whole = start_run(toy.make_state(), toy.make_clients(), plan)
    list(whole.rounds(ROUNDS))
    other = toy.make_plan(aggregate=Halves(scale=2))
    with pytest.raises(InputError, match="another aggreg"):
        resume_run(toy.make_state(), toy.make_clients(), other, tmp_path)
    run = resume_run(toy.make_state(), toy.make_clients(), plan, tmp_path)
    assert len(run.records) == KILLED_IN
    list(run.rounds(ROUNDS))
    assert run.records == whole.records
    assert toy.model_bytes(run.state) == toy.model_bytes(whole.state)
    assert set(run.records[0].seen_in_sum) == {"left server", "right server"}
    run.close()


def test_it_is_refused_where_it_cannot_keep_a_promise():
    """It declares no noise, and counts nobody."""
    private = toy.make_plan(aggregate=HALVES, privacy=Privacy(1.0, 1.0))
    with pytest.raises(InputError, match="does not declare"):
        start_run(toy.make_state(), toy.make_clients(), private)
    counted = toy.make_plan(aggregate=HALVES, over="choosers")
    with pytest.raises(InputError, match="counts nobody"):
        list(start_run(toy.make_state(), toy.make_clients(), counted).rounds(1))


def test_a_run_by_name_shows_it_in_plan_trust_table_record_and_report(tmp_path, monkeypatch):
    # Another test of this process may have started JAX.
    monkeypatch.setattr("keyhole.rounds.cores.use_one_thread", lambda: None)
    out = tmp_path / "runs"
    args = ["--data", "synthetic", "--size", "words=200", "--size", "tags=4", "--cohort", "3"]
    args += ["--m", "10", "--rounds", "1", "--out", str(out), "--aggregation", NAME]
    done = CliRunner().invoke(keyhole, ["train", "so_tag", *args])
    assert done.exit_code == 0, done.output
    assert "left server" in done.output
    record = json.loads(next(out.rglob("records.jsonl")).read_text())
    assert set(record["seen_in_sum"]) == {"left server", "right server"}
    told = CliRunner().invoke(keyhole, ["report", str(out), "--out", str(tmp_path / "page")])
    assert told.exit_code == 0, told.output
    pages = "".join(page.read_text() for page in (tmp_path / "page").rglob("*.html"))
    assert [word for word in ("left server", "two halves") if word not in pages] == []
    load = Workload(num_keys=1_000, keys_per_client=10, slice_bytes=40, cohort=5)
    assert price_sums(load, [HALVES])[-1].name == "halves"
    numbers = {"num-keys": 1000, "keys-per-client": 10, "slice-bytes": 40, "cohort": 5}
    flags = [word for name, n in numbers.items() for word in (f"--{name}", str(n))]
    shown = CliRunner().invoke(
        keyhole, ["plan", *flags, "--round-seconds", "60", "--aggregation", NAME, "--json"]
    )
    assert {need["party"] for need in json.loads(shown.output)["needs"] if need["way"] == "halves"}


def test_devices_and_two_aggregators_make_the_model_of_one_process(tmp_path):
    plan = make_plan(aggregate=HALVES)
    own = lambda client, send: replace(send, aggregation=HALVES)  # noqa: E731
    with (
        small_service(tmp_path / "rounds") as service,
        aggregators(tmp_path / "sums", aggregation=HALVES) as pair,
        devices(service, pair, to=own) as met,
    ):
        run = start_run(make_state(), private_run.make_clients(), plan, kind=served(service, pair))
        records = list(run.rounds(2))
    expected = start_run(make_state(), private_run.make_clients(), plan)
    assert [each.clients for each in records] == [each.clients for each in expected.rounds(2)]
    assert model_bytes(run.state) == model_bytes(expected.state)
    assert set(records[0].seen_in_sum) == {"left server", "right server", "trainer"}
    assert not met


def test_aggregators_and_devices_of_another_sum_take_nothing_of_it():
    (name,) = aggregation_names(lambda about: about.is_shared)
    shared: Any = aggregation_named(name)
    inbox, _ = opened(HALVES)
    with pytest.raises(MalformedError):
        shared.facts(inbox._now().params)
    with pytest.raises(MalformedError):
        HALVES.facts(opened(shared)[0]._now().params)


@dataclass(frozen=True)
class Wrapped:
    """A wrapper that forwards what a run in one process needs."""

    inner: Aggregation

    @property
    def about(self):
        return self.inner.about

    def add(self, request):
        return self.inner.add(request)


class Forwarded(Wrapped):
    """A wrapper that forwards everything."""

    def __getattr__(self, name):
        return getattr(object.__getattribute__(self, "inner"), name)


def opened(aggregate, **changes):
    """Aggregators with an open round, and what its devices are told."""
    lines = [AggregatorClient(HttpClient("http://127.0.0.1:9"), "x", party) for party in (0, 1)]
    inbox = SumServices(*lines, salt=bytes(16))
    plan = make_plan(aggregate=aggregate, **changes)
    return inbox, inbox.open(0, range(5), private_run.LAYOUT, plan)


def test_a_wrapper_is_served_with_the_same_params_or_refused():
    (name,) = aggregation_names(lambda about: about.is_shared)
    for inner in (HALVES, aggregation_named(name)):
        assert opened(Forwarded(inner))[1] == opened(inner)[1]
        with pytest.raises(InputError, match="cannot run"):
            opened(Wrapped(inner))


def test_no_sum_in_the_clear_is_sent_to_aggregators():
    for name in aggregation_names(lambda about: not about.is_shared):
        with pytest.raises(InputError, match="cannot add up for this run"):
            opened(aggregation_named(name))
    with pytest.raises(InputError, match="cannot add up for this run"):
        opened(HALVES, privacy=Privacy(1.0, 1.0))


if __name__ == "__main__":
    die_in_the_third_round(sys.argv[1])
