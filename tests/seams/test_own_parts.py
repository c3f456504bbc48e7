"""Own parts: an optimizer is resumed, and a wrong return value is named."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from keyhole.errors import InputError
from keyhole.rounds.loop import Evaluation, start_run
from keyhole.server.optimizers import SGD
from tests.rounds import toy
from tests.seams.toys import ROUNDS, resumed, started


@dataclass(frozen=True)
class HalfStep(SGD):
    """An optimizer that the library does not know."""

    def step(self, slab, slots, rows, now):
        return super().step(slab, slots, rows * np.float32(0.5), now)


def test_a_run_with_an_own_optimizer_is_resumed_to_the_same_bytes(tmp_path):
    whole = start_run(toy.make_state(HalfStep(1.0)), toy.make_clients(), toy.make_plan())
    list(whole.rounds(2 * ROUNDS))
    started(tmp_path, state=toy.make_state(HalfStep(1.0)))
    run = resumed(tmp_path, state=toy.make_state(HalfStep(1.0)))
    list(run.rounds(2 * ROUNDS))
    run.close()
    assert toy.model_bytes(run.state) == toy.model_bytes(whole.state)


def test_a_choice_that_returns_an_array_is_told_what_to_return():
    def own_choice(examples, context):
        return np.arange(3)

    clients = replace(toy.make_clients(), choose=own_choice)
    with pytest.raises(InputError, match="choose"):
        list(start_run(toy.make_state(), clients, toy.make_plan()).rounds(1))


def test_metrics_that_return_a_number_are_told_what_to_return():
    def own_metrics(state) -> Any:
        return 0.5

    run = start_run(toy.make_state(), toy.make_clients(), toy.make_plan())
    with pytest.raises(InputError, match="metrics"):
        list(run.rounds(1, evaluation=Evaluation(own_metrics)))
