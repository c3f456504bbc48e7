"""The contract of engines, on Flower: the plans of `tests/engines/test_contract.py` in which every
client answers give the same bytes of state, and the same clients the same outcome."""

import pytest

from keyhole.device.take_part import PopulationClient
from keyhole.rounds.loop import start_run
from keyhole.rounds.record import decode_records
from tests.engines import crowd
from tests.engines.flower.test_same_bytes import grid_of, rounds_of
from tests.engines.test_contract import FAST, PLANS, ROUNDS, plan_named, train_alone
from tests.rounds import toy
from tests.service.small_service import small_service

FATES = ("clients", "closed", "lost_before", "lost_after", "late", "refused", "staleness", "step")


def answers(name):
    """Whether a plan leaves it to devices who drops out, and sums in the clear."""
    losses = {"lost_before", "lost_after"} & PLANS[name].get("cohorts", {}).keys()
    return not losses and not {"aggregation", "buffering"} & PLANS[name].keys()


def participant_in(folder):
    """What makes participants, anew in every round: their states are in a folder."""

    def participant_of(client, context):
        own = toy.REHEARSED, folder / str(client)
        return PopulationClient(client, lambda _: crowd.make_clients(), *own).participant()

    return participant_of


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in FAST else pytest.mark.slow)
        for name in PLANS
        if answers(name)
    ],
)
def test_flower_changes_no_byte_of_the_state(tmp_path, name):
    grid = grid_of(None, None, participant_of=participant_in(tmp_path / "states"))
    with small_service(tmp_path / "service") as service:
        kind = rounds_of(grid, service)
        run = start_run(toy.make_state(), crowd.make_clients(), plan_named(name), kind=kind)
        records = list(run.rounds(ROUNDS))
        grid.close()
    state, expected = train_alone(name)
    assert toy.model_bytes(run.state) == state
    for record, other in zip(records, decode_records(expected), strict=True):
        assert [getattr(record, f) for f in FATES] == [getattr(other, f) for f in FATES]
    assert any(record.refused for record in records) or name == "one block"
