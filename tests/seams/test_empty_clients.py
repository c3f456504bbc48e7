"""Clients that bring nothing: one is recorded, a whole cohort in every round ends the run."""

from dataclasses import replace

import numpy as np
import pytest

from keyhole.errors import KeyholeError
from keyhole.models.client_update import ClientUpdate
from keyhole.models.local_training import LocalSgd
from keyhole.models.logistic import tag_regression
from keyhole.rounds.clients import Clients
from keyhole.rounds.loop import start_run
from keyhole.rounds.spec import RunParts
from keyhole.sampling import Cohorts
from keyhole.server.optimizers import SGD
from keyhole.server.state import ServerState
from tests.rounds import toy

MODEL = tag_regression(8, 2)
(WORD,) = MODEL.layout.spaces
WITHOUT = 1  # the client whose keys meet none of its examples


def choose(words, context):
    return WORD.keys([7] if WITHOUT in words else words)


def localize(words, keys):
    """One example for each word that the client holds."""
    held = [at for at, word in enumerate(keys["word"]) if word in words]
    return {"words": np.array(held, np.int64)[:, None], "tags": np.ones((len(held), 2), np.float32)}


def test_a_client_without_examples_is_recorded_and_the_run_goes_on():
    clients = Clients(
        3, lambda client: [client], choose, LocalSgd(MODEL, ClientUpdate(0.1)), localize
    )
    state = ServerState.dense(MODEL.layout, MODEL.init(0), SGD(1.0))
    run = start_run(state, clients, RunParts(Cohorts(3, 3), {"word": 2}))
    for record in run.rounds(2):
        assert record.empty == [WITHOUT]
        assert len(record.staleness) == 2


def none_of_them(words, context):
    return WORD.keys([])


def one_has_a_key(words, context):
    return WORD.keys([7] if words == [0] else [])


@pytest.mark.parametrize(
    ("choose_keys", "is_over"), [(none_of_them, True), (one_has_a_key, False), (choose, False)]
)
def test_rounds_in_which_nobody_chooses_a_key_end_the_run(choose_keys, is_over):
    """Keys that meet no example are another thing: they may meet one in the next round."""
    train = LocalSgd(MODEL, ClientUpdate(0.1))
    clients = Clients(3, lambda client: [client], choose_keys, train, localize)
    state = ServerState.dense(MODEL.layout, MODEL.init(0), SGD(1.0))
    run = start_run(state, clients, RunParts(Cohorts(3, 3), {"word": 2}))
    if is_over:
        with pytest.raises(KeyholeError, match="no client chose a key in 3 rounds in a row: got 9"):
            list(run.rounds(50))
        assert len(run.records) == 3
    else:
        assert len(list(run.rounds(5))) == 5


def all_nan(submodel, examples, rng):
    return {"x": np.full_like(submodel["x"], np.nan)}


def test_cohorts_that_are_refused_whole_end_the_run():
    run = start_run(toy.make_state(), replace(toy.make_clients(), train=all_nan), toy.make_plan())
    with pytest.raises(KeyholeError, match="rounds in a row"):
        list(run.rounds(50))
    assert 2 <= len(run.records) <= 20
    assert all(len(record.refused) == 5 for record in run.records)
