"""An outsider's own private delivery: trained with, planned, killed, resumed, used by a device."""

import json
import subprocess
import sys
from contextlib import ExitStack

import pytest
from click.testing import CliRunner

from keyhole.cli.plan import plan as plan_command
from keyhole.cli.runs import trust_table
from keyhole.delivery import delivery_named
from keyhole.device.take_part import fetch_by
from keyhole.errors import InputError
from keyhole.rounds.loop import start_run
from keyhole.sampling import Cohorts
from keyhole.wire.private import role_named
from tests.rounds import toy
from tests.seams import killed
from tests.seams.own_delivery import MASKED, PLAIN
from tests.service.pir.pair import pair
from tests.service.pir.test_pir_training import ROUNDS, train_over

NAMED = "tests.seams.own_delivery:MASKED"
COHORT, LIMIT = Cohorts(len(toy.EXAMPLES), 2), {"feature": 8}
KILL = (
    "import sys; from tests.seams import killed, test_own_delivery as own; "
    "killed.part = own.part; killed.main(sys.argv[1], 'delivery')"
)


def part(name, variant=0):
    """State, clients, plan and how rounds are made; variant 1 is another toy of the same name."""
    delivery = (delivery_named(NAMED), PLAIN)[variant].for_run(LIMIT)
    plan = toy.make_plan(cohorts=COHORT, keys_per_client=LIMIT, delivery=delivery)
    return toy.make_state(), toy.make_clients(), plan, {}


def run_of(rounds, **plan):
    plan = toy.make_plan(cohorts=COHORT, keys_per_client=LIMIT, **plan)
    run = start_run(toy.make_state(), toy.make_clients(), plan)
    list(run.rounds(rounds))
    return run


def test_it_trains_the_bytes_of_slices_in_the_clear_and_is_in_the_record_and_the_trust_table():
    run = run_of(ROUNDS, delivery=MASKED.for_run(LIMIT))
    assert toy.model_bytes(run.state) == toy.model_bytes(run_of(ROUNDS).state)
    assert run.records[-1].seen_by == {"own server": "who takes part"}
    assert "own server" in trust_table(run.records[-1]).columns[0]._cells


def test_it_is_planned_by_its_name_in_a_module():
    numbers = ["--num-keys=100", "--keys-per-client=8", "--slice-bytes=40", "--cohort=5"]
    found = CliRunner().invoke(plan_command, [*numbers, "--delivery", NAMED, "--force", "--json"])
    assert found.exit_code == 0, found.output
    price = json.loads(found.output)["prices"][-1]
    assert (price["way"], price["seen_by"]["own server"]["whose"]) == ("own", True)


def test_a_killed_run_goes_on_to_the_same_bytes_and_not_with_another_of_its_name(
    tmp_path, monkeypatch
):
    subprocess.run([sys.executable, "-c", KILL, str(tmp_path)], check=True)
    monkeypatch.setattr(killed, "part", part)
    with pytest.raises(InputError, match="another delivery"):
        killed.resume("delivery", tmp_path / "delivery", variant=1)
    resumed = killed.resume("delivery", tmp_path / "delivery")
    whole = run_of(killed.ROUNDS, delivery=MASKED.for_run(LIMIT))
    assert resumed.records == whole.records
    assert toy.model_bytes(resumed.state) == toy.model_bytes(whole.state)


def test_devices_that_fetch_by_it_over_the_service_train_the_same_bytes(tmp_path):
    plan = toy.make_plan(cohorts=COHORT, keys_per_client=LIMIT)
    with ExitStack() as stack:
        both = stack.enter_context(pair(tmp_path, [role_named(NAMED)]))
        run = train_over(both, fetch_by(delivery_named(NAMED), {}), plan)
        assert both.metric(0, "keyhole_private_queries_total") == 2 * ROUNDS
        assert both.metric(0, "keyhole_keys_total") == 0
    expected = run_of(ROUNDS, delivery=MASKED.for_run(LIMIT))
    assert toy.model_bytes(run.state) == toy.model_bytes(expected.state)
