"""A device is killed while it sends its shares: before or after each message to an aggregator.

What its ledger says must never be less than what can be read from a sum: where both aggregators
have its share, the sum is noted. And an attempt that stopped before the second share left costs
nothing: one share alone is random numbers. A device that notes the sum last is the planted hole.
"""

import json
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from keyhole.aggregation.privacy.ledger import read_ledger
from tests.attacks.killed_sender import Job, send
from tests.helpers import ROOT
from tests.service.small_service import small_service
from tests.service.sums.aggregators import aggregators
from tests.service.sums.private_run import LAYOUT, make_plan, make_state, services

MESSAGES = ["asks 0", "asks 1", "sends to 0", "sends to 1"]
DEATHS = {
    f"device-{2 * number + place}": (number + 1, when)
    for number in range(len(MESSAGES))
    for place, when in enumerate(("before", "after"))
}
AROUND = ("device-5", "device-6", "device-7")  # before the charge, after it, after the second share
LATE = "device-8"  # dies after the second share, before it notes what it spent


@contextmanager
def killed(directory, names):
    """Devices that were killed; gives their job, the aggregators, the round and its trainer."""
    deaths = {**{name: DEATHS[name] for name in names}, LATE: (len(MESSAGES), "after")}
    (directory / "ledgers").mkdir()
    with small_service(directory / "rounds") as service, aggregators(directory / "sums") as pair:
        inbox = services(pair)
        settings = inbox.open(0, range(len(DEATHS) + 1), LAYOUT, make_plan())
        told = {"settings": settings, "cohort": [*DEATHS, LATE], "before": inbox.begin}
        state = service.publish_state(make_state(), **told)
        (directory / "trainer.pub").write_text(service.trainer.public.encode())
        keys = [pair.public(party).hex() for party in (0, 1)]
        job = {
            "url": service.url,
            "trainer_key": str(directory / "trainer.pub"),
            "aggregators": [f"{url}#{key}" for url, key in zip(pair.urls, keys, strict=True)],
            "tokens": {
                name: [service.token(name), *(pair.device_token(party, name) for party in (0, 1))]
                for name in deaths
            },
            "ledgers": str(directory / "ledgers"),
            "deaths": deaths,
            "late": (LATE,),
        }
        command = [sys.executable, "-m", "tests.attacks.killed_sender", json.dumps(job)]
        subprocess.run(command, cwd=ROOT, check=True)
        yield Job(**job), pair, state.published.id, service.trainer.public


@pytest.fixture(scope="module", params=[AROUND, pytest.param((*DEATHS,), marks=pytest.mark.slow)])
def world(request, tmp_path_factory):
    with killed(tmp_path_factory.mktemp("killed"), request.param) as found:
        yield found


def noted(job, name):
    return len(read_ledger(Path(job.ledgers) / name))


def test_a_device_that_is_killed_spends_what_can_be_read_and_no_more(world):
    job, pair, round_id, trainer = world
    names = [name for name in job.deaths if name != LATE]
    here = [set(pair.trainer(party).status(round_id).devices) - {LATE} for party in (0, 1)]
    assert here == [set(AROUND), {"device-7"}]
    # On the disk before the second share leaves, and not before that.
    assert [name for name in names if noted(job, name)] == ["device-6", "device-7"]
    for name in (names[0], "device-6"):  # started again, it sends, and is charged once
        send(job, name, trainer)
        assert noted(job, name) == 1
        assert name in pair.trainer(1).status(round_id).devices


def test_a_device_that_notes_sums_last_takes_part_for_nothing(world):
    """The hole."""
    job, pair, round_id, _ = world
    assert all(LATE in pair.trainer(party).status(round_id).devices for party in (0, 1))
    assert noted(job, LATE) == 0
