"""Two parts of one name are two runs, and one part that was made twice is one run."""

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest

from keyhole.errors import InputError
from keyhole.experiments.experiment import Experiment
from keyhole.experiments.specs import spec_of
from keyhole.rounds.loop import Synchronous, resume_run, start_run
from keyhole.rounds.spec import RunParts
from keyhole.sampling import Cohorts
from keyhole.server.optimizers import SGD
from tests.experiments.small import writers
from tests.rounds import toy
from tests.seams.toys import ScaledSum, Sum, resumed, scaled_sum, started

DOUBLE, TRIPLE = (Sum(lambda request, f=factor: scaled_sum(f).add(request)) for factor in (2, 3))

PAIRS = {"closures": (scaled_sum(1), scaled_sum(2)), "lambdas": (DOUBLE, TRIPLE)}


def train_with(lr):
    """A train function; all of them have one name."""

    def own_train(submodel, examples, rng):
        update = toy.train(submodel, examples, rng)
        return {"x": lr * update["x"]}

    return own_train


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_two_functions_of_one_name_are_two_plans(pair):
    one, other = (toy.make_plan(aggregate=each).describe() for each in pair)
    assert one != other


def test_a_run_does_not_go_on_with_another_sum(tmp_path):
    started(tmp_path, aggregate=scaled_sum(1))
    with pytest.raises(InputError, match="another aggreg"):
        resumed(tmp_path, aggregate=scaled_sum(2))


def test_a_run_does_not_go_on_with_another_train_function(tmp_path):
    one, other = (replace(toy.make_clients(), train=train_with(lr)) for lr in (1.0, 7.0))
    started(tmp_path, clients=one)
    with pytest.raises(InputError, match="train"):
        resumed(tmp_path, clients=other)


def test_a_run_does_not_go_on_with_another_learning_rate(tmp_path):
    started(tmp_path, state=toy.make_state(SGD(1.0)))
    with pytest.raises(InputError, match="another"):
        resumed(tmp_path, state=toy.make_state(SGD(0.1)))


class Slower(Synchronous):
    """Rounds of one's own."""

    def __init__(self, factor):
        super().__init__()
        self.factor = factor


def test_a_run_does_not_go_on_with_other_rounds(tmp_path):
    parts = (toy.make_state(), toy.make_clients(), toy.make_plan())
    start_run(*parts, tmp_path, kind=Slower(1)).close()
    with pytest.raises(InputError, match="another kind"):
        resume_run(*parts, tmp_path, kind=Slower(2))
    resume_run(*parts, tmp_path, kind=Slower(1)).close()


def tuple_sum(factor) -> Any:
    class Sum(NamedTuple):
        scale: float

        def add(self, request):
            return scaled_sum(factor).add(request)

    return Sum(1.0)


def test_a_tuple_with_code_of_its_own_is_a_part():
    one, other = (RunParts(Cohorts(9, 3), {"word": 5}, aggregate=tuple_sum(k)) for k in (1, 2))
    assert one.describe()["aggregate"] != other.describe()["aggregate"]


def test_a_new_instance_with_the_same_values_goes_on(tmp_path):
    first, second = ScaledSum(2), ScaledSum(2)  # both alive: they cannot have one address
    started(tmp_path, aggregate=first)
    run = resumed(tmp_path, aggregate=second)
    assert run.next_round == len(run.records) > 0
    run.close()


def choose_from(first):
    """A choice of keys; all of them have one name."""

    def own_choice(context):
        return np.arange(first, first + context.max_keys)

    return own_choice


def experiment(**parts):
    spec = spec_of(
        "emnist_2nn",
        sizes={"neurons": 16, "hidden": 8},
        keys={"neuron": {"count": 4}},
        rounds=1,
        cohort={"size": 1},
    )
    return Experiment(spec, writers(), **parts)


def test_the_result_of_another_choice_is_not_returned(tmp_path):
    one, other = (experiment(parts={"keys.neuron.choice": choose_from(first)}) for first in (0, 8))
    one.run(0, tmp_path)
    with pytest.raises(InputError, match="another"):
        other.run(0, tmp_path)


@pytest.mark.parametrize("path", ["aggregation.name", "delivery", "task", "engine"])
def test_a_part_of_another_kind_is_refused_by_its_place(path):
    with pytest.raises(InputError, match=f"{path} is no "):
        experiment(parts={path: choose_from(0)})


def test_data_are_no_part():
    with pytest.raises(InputError, match="as `dataset`"):
        experiment(parts={"data": choose_from(0)})
