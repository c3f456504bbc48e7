"""The front door: a model, data that name its keys, and a run that can be looked at."""

from dataclasses import replace

import numpy as np
import pytest

import keyhole as kh
from keyhole.data.federated import Dataset, FederatedData, Ragged
from keyhole.errors import CutError, InputError
from keyhole.experiments.opening import open_data
from keyhole.experiments.specs import spec_of
from keyhole.models.dense import masked_mean
from keyhole.models.local_training import LocalSgd
from keyhole.parts import resolve

ITEMS, USERS, EACH = 60, 12, 10


def _loss(params, batch, mask):
    return masked_mean((_predict(params, batch) - batch["label"]) ** 2, mask)


def _predict(params, batch):
    return params["score"][batch["item"]]


def mse(outputs, examples):
    return float(np.mean((outputs - examples["label"]) ** 2))


def make_model(space=None):
    return kh.Model(
        init=lambda seed: {"score": np.zeros(ITEMS, np.float32)},
        loss=_loss,
        predict=_predict,
        cuts=(kh.Cut(space or kh.KeySpace("item", ITEMS), {"score": 0}),),
    )


def make_data(inputs=None, seed=0):
    rng = np.random.default_rng(seed)
    item = rng.integers(ITEMS, size=USERS * EACH)
    columns = {"item": item, "label": (item % 7).astype(np.float32)}
    people = FederatedData.of([f"u{i}" for i in range(USERS)], [EACH] * USERS, columns)
    splits = {"train": people.subset(range(8)), "test": people.subset(range(8, USERS))}
    return Dataset(
        "mine", "stars", splits, {}, inputs={"item": "item"} if inputs is None else inputs
    )


def make_task(**changes):
    return kh.Task(make_model(), make_data(), metrics={"mse": mse}, **changes)


SETTINGS = {"cohort": 4, "client_lr": 0.5, "mean_over": "choosers", "progress": False}


def test_a_run_in_memory_has_records_a_model_and_metrics():
    run = kh.train(make_task(), rounds=20, m=5, **SETTINGS)
    assert run.rounds == 20
    assert run.model()["score"].shape == (ITEMS,)
    assert run.metrics["mse"] == pytest.approx(run.evaluate()["mse"])
    untrained = float(np.mean(make_data().splits["test"].columns["label"] ** 2))
    assert run.metrics["mse"] < 0.9 * untrained
    assert (run.spec.keys["item"].count, run.spec.cohort.size) == (5, 4)


def test_a_task_prints_as_one_short_line():
    said = repr(make_task())
    assert said.startswith("<task task: item of 60 keys; metrics mse; <data set mine: ")
    assert "\n" not in said
    assert len(said) < 250


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"rounds": 0}, "rounds is out of range: got 0; expected a whole number, 1 or more; pass"),
        ({"rounds": 2.5}, "rounds is not a whole number: got 2.5; expected "),
        (
            {"client_lr": "x"},
            "client_lr is not a number: got 'x'; expected a number, more than 0; ",
        ),
        ({"client_lr": np.nan}, "client_lr is out of range: got nan; "),
        ({"client_momentum": 1}, "got 1; expected a number, 0 or more and less than 1; "),
        ({"mean_over": "chooser"}, "mean_over is not known: got 'chooser'; expected cohort, "),
        ({"mean_over": "chooser"}, "did you mean choosers?"),
        ({"trials": 0}, "trials is out of range: got 0; "),
        ({"m": -1}, "m of 'item' is out of range: got -1; "),
        ({"m": 0}, "m of 'item' is out of range: got 0; expected a whole number from 1; "),
    ],
)
def test_a_value_out_of_range_is_named_as_it_was_given(given, said):
    with pytest.raises(InputError) as caught:
        kh.train(make_task(), **{"rounds": 1, **given})
    assert said in str(caught.value)


def test_numbers_of_numpy_are_numbers():
    run = kh.train(
        make_task(), rounds=np.int64(1), m=np.int64(5), **{**SETTINGS, "cohort": np.int32(2)}
    )
    assert (run.rounds, run.spec.cohort.size) == (1, 2)


def test_fewer_keys_are_fewer_bytes():
    few = kh.train(make_task(), rounds=10, m=5, **SETTINGS)
    whole = kh.train(make_task(), rounds=10, m="all", **SETTINGS)
    at, values = few.curve("mse", against="bytes")
    assert values.shape == (1, 1) == (1, len(at))
    assert at[-1] < whole.curve("mse", against="bytes")[0][-1] / 2


def test_the_same_call_goes_on_with_more_rounds_and_gives_the_same_bytes(tmp_path):
    """Tasks are made anew each time, as in a script that is started twice."""
    kh.train(make_task(), rounds=4, m=5, out=tmp_path / "run", **SETTINGS)
    further = kh.train(make_task(), rounds=8, m=5, out=tmp_path / "run", **SETTINGS)
    at_once = kh.train(make_task(), rounds=8, m=5, **SETTINGS)
    assert np.array_equal(further.model()["score"], at_once.model()["score"])
    assert further.rounds == 8


def test_a_choice_of_the_library_goes_by_its_name():
    for named in ("Random-Top", {"item": "random-top"}):
        assert make_task(keys=named).choices == {"item": kh.keys.random_top}


def test_a_metric_that_was_measured_after_the_last_round_alone_is_told():
    run = kh.train(make_task(), rounds=2, m=3, **{**SETTINGS, "evaluate_every": 10})
    assert "mse" in run.metrics
    with pytest.raises(InputError, match=r"'mse' was measured after the last round alone: got 2 r"):
        run.curve("mse")


def test_another_choice_of_keys_is_another_run(tmp_path):
    kh.train(make_task(), rounds=2, m=5, out=tmp_path / "run", **SETTINGS)

    def last(context):
        return context.counts.keys[-context.max_keys :]

    with pytest.raises(InputError, match="holds another run"):
        kh.train(make_task(keys=last), rounds=2, m=5, out=tmp_path / "run", **SETTINGS)


def test_an_example_whose_key_is_not_selected_is_dropped():
    task = make_task()
    own = {"item": np.array([3, 9, 4]), "label": np.array([1.0, 2.0, 3.0])}
    found = task.localize(own, {"item": kh.KeySpace("item", ITEMS).keys([4, 3])})
    assert found["item"].tolist() == [1, 0]
    assert found["label"].tolist() == [1.0, 3.0]


class TrainsAlone:
    """A model that brings its own local training, and takes rows of unequal length."""

    layout = make_model().layout
    init = predict = trainer = staticmethod(print)


def rows_of(column):
    splits = {
        name: FederatedData.of(["a"], [len(column)], {"item": column}) for name in ("train", "test")
    }
    return Dataset("mine", "x", splits, {}, inputs={"item": "item"})


def localized(model, column):
    task = kh.Task(model, rows_of(column))
    own = task.data.splits["train"].client(0)
    return task.localize(own, {"item": kh.KeySpace("item", ITEMS).keys([3])})["item"]


def test_an_entry_of_a_row_is_dropped_alone_where_rows_are_of_unequal_length():
    found = localized(TrainsAlone(), Ragged.of([[3, 9], [9], []]))
    assert [row.tolist() for row in found] == [[0], []]


def test_an_example_of_a_matrix_is_dropped_whole():
    assert localized(make_model(), np.array([[3, 9], [3, 3]])).tolist() == [[0, 0]]


def test_rows_of_unequal_length_are_refused_for_a_jax_model_by_their_column():
    with pytest.raises(InputError, match=r"column 'item' has rows of unequal length.*got 1 to 2"):
        kh.Task(make_model(), rows_of(Ragged.of([[3, 9], [9]])))


def test_an_unknown_key_stands_for_those_not_selected():
    task = make_task(missing="unknown", unknown={"item": 0})
    own = {"item": np.array([3, 9]), "label": np.array([1.0, 2.0])}
    found = task.localize(own, {"item": kh.KeySpace("item", ITEMS).keys([0, 3])})
    assert found["item"].tolist() == [1, 0]
    run = kh.train(task, rounds=2, m=5, **SETTINGS)
    assert run.rounds == 2


def test_a_key_that_is_not_selected_can_be_an_error():
    task = make_task(missing="error")
    own = {"item": np.array([3, 9]), "label": np.array([1.0, 2.0])}
    with pytest.raises(InputError, match="got 9 in column 'item'"):
        task.localize(own, {"item": kh.KeySpace("item", ITEMS).keys([3])})


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: kh.Task(make_model(), make_data(inputs={})), "is not declared"),
        (lambda: kh.Task(make_model(), make_data({"itm": "item"})), "did you mean item?"),
        (lambda: kh.Task(make_model(), make_data({"item": "itme"})), "did you mean item?"),
        (lambda: make_task(keys={"itme": lambda *_: ()}).choices, "did you mean item?"),
        (
            lambda: kh.Task(replace(make_model(), cuts=()), make_data()),
            "expected a model that is cut; pass the model cut",
        ),
        (
            lambda: kh.Task(make_model(), np.zeros(3)),
            "are no data set: got a ndarray; expected a D",
        ),
        (
            lambda: kh.Task(make_model(), make_data(), metrics=mse),
            "metrics of a task have no names: got a function; ",
        ),
        (lambda: make_task(keys="random-tpo").choices, "did you mean random-top?"),
        (lambda: make_task(missing="skip"), "expected drop, unknown or error"),
        (lambda: make_task(missing="unknown"), "pass unknown="),
        (lambda: make_task(unknown={"item": ITEMS}), "unknown names no key"),
        (lambda: kh.train(make_task(), rounds=1, m=5, cohrt=3), "did you mean cohort?"),
        (
            lambda: kh.train(make_task(), rounds=1, keys="top"),
            r"pass it to kh\.Task\(keys=\.\.\.\)",
        ),
        (lambda: kh.train(make_task(), rounds=1, m="some"), "expected a whole number"),
        (lambda: kh.train(make_task(), rounds=1, m={"itm": 3}), "did you mean item?"),
        (lambda: kh.train(make_task(), rounds=1, m=ITEMS + 1, **SETTINGS), "out of range"),
    ],
)
def test_a_mistake_is_named(make, said):
    with pytest.raises(InputError, match=said):
        make()


def test_a_metric_that_returns_an_array_is_named():
    task = kh.Task(make_model(), make_data(), metrics={"errors": lambda out, _: out})
    with pytest.raises(InputError, match="metric 'errors' is no number: got an array"):
        kh.train(task, rounds=1, m=5, evaluate_every=1, **SETTINGS)


def test_how_clients_train_is_set_by_keywords():
    local = {"epochs": 3, "client_momentum": 0.5, "client_clip_norm": 0.2}
    run = kh.train(make_task(), rounds=1, batch_size=EACH, **{**SETTINGS, "cohort": 8}, **local)
    update = kh.ClientUpdate(0.5, epochs=3, batch_size=EACH, momentum=0.5, clip_norm=0.2)
    train, start = LocalSgd(make_model(), update), make_model().init(0)
    people = make_data().splits["train"]
    told = [train(start, people.client(n), np.random.default_rng(0)) for n in range(8)]
    ends = [report.update["score"] for report in told]
    assert np.allclose(run.model()["score"], -np.mean(ends, axis=0), atol=1e-6)
    assert run.records()[0].client_metrics["loss"].mean == pytest.approx(
        np.mean([report.metrics["loss"] for report in told]), rel=1e-5
    )
    assert run.spec.client.clip_norm == 0.2


def test_metrics_of_a_secure_sum_are_names_with_a_max():
    secure = {"aggregation": "secure-dense", "m": 5, "rounds": 1, **SETTINGS}
    with pytest.raises(InputError, match="sum_metrics is no dict: got a list"):
        kh.train(make_task(), sum_metrics=["loss"], **secure)
    found = kh.train(make_task(), sum_metrics={"loss": 100.0}, **secure)
    plain = kh.train(make_task(), **{**secure, "aggregation": "plain"})
    told, known = (run.records()[0].client_metrics["loss"] for run in (found, plain))
    assert told.mean == pytest.approx(known.mean, abs=1e-3)
    assert (told.deciles, len(known.deciles)) == ([], 9)


def test_parts_of_your_own_are_objects():
    from keyhole.aggregation.plain import PLAIN

    run = kh.train(make_task(), rounds=2, m=5, aggregation=PLAIN, **SETTINGS)
    assert run.spec.aggregation.name is not None


@pytest.mark.parametrize("choice", [kh.keys.rolling, kh.keys.importance, kh.keys.tf_idf])
def test_a_choice_that_sees_more_than_own_data_trains_and_resumes(choice, tmp_path):
    def train(rounds, out):
        return kh.train(make_task(keys=choice), rounds=rounds, m=4, out=out, **SETTINGS)

    whole = train(4, None)
    train(2, tmp_path)
    again = train(4, tmp_path)
    assert again.model()["score"].tobytes() == whole.model()["score"].tobytes()
    assert np.count_nonzero(whole.model()["score"]) > 0


def test_tf_idf_is_refused_with_noise_and_in_rounds_that_do_not_tell_users():
    task = make_task(keys=kh.keys.tf_idf)
    with pytest.raises(InputError, match="privacy account does not cover"):
        kh.train(task, rounds=1, m=4, dp_noise=1.0, dp_clip=1.0, dp_delta=1e-3, **SETTINGS)
    parts = {"task": task.kind, "keys.item.choice": kh.keys.tf_idf}
    served = kh.Experiment(task.defaults.changed({"keys.item.count": 4}), task.data, parts)
    with pytest.raises(InputError, match="clients of these rounds cannot choose keys in this way"):
        served.run(0, kind=object())


def test_data_that_nobody_declared_to_name_keys_are_no_silent_mistake():
    """A column of another name than the key space, forgotten: clients would choose no key."""
    data = make_data()
    renamed = {
        name: replace(split, columns={"film" if c == "item" else c: v for c, v in each.items()})
        for name, split in data.splits.items()
        if (each := split.columns)
    }
    task = kh.Task(make_model(), replace(data, splits=renamed, inputs={}), metrics={"mse": mse})
    with pytest.raises(
        InputError, match=r"no column is declared .* of 'item'.*columns film, label"
    ):
        kh.train(task, rounds=1, m=5, **SETTINGS)


@pytest.mark.parametrize("split", ["train", "test"])
def test_a_key_beyond_the_table_names_column_client_and_key(split):
    data = make_data()
    wrong = data.splits[split].compact()
    wrong.columns["item"][EACH + 3] = ITEMS
    client = wrong.client_ids[1]
    beyond = replace(data, splits={**data.splits, split: wrong})
    with pytest.raises(InputError, match=f"column 'item' of client '{client}' .*got 60"):
        kh.Task(make_model(), beyond)


def test_a_key_that_was_not_selected_names_the_client():
    with pytest.raises(InputError, match=r"^client \d in round 0: a client's data name a key"):
        kh.train(make_task(missing="error"), rounds=1, m=2, **SETTINGS)


def test_a_cut_of_no_parameter_suggests_the_nearest():
    model = replace(make_model(), cuts=(kh.Cut(kh.KeySpace("item", ITEMS), {"scores": 0}),))
    with pytest.raises(CutError, match=r"got 'scores'; expected 'score'; did you mean score\?"):
        kh.Task(model, make_data())


def test_a_metric_that_returns_an_array_is_named_with_its_shape():
    task = kh.Task(make_model(), make_data(), metrics={"mse": lambda outputs, examples: outputs})
    with pytest.raises(InputError, match=r"metric 'mse' is no number: got an array of shape \(40,"):
        kh.train(task, rounds=1, m=5, **SETTINGS)


def test_clients_without_examples_are_left_out_and_none_at_all_is_an_error():
    columns = {"item": np.arange(6), "label": np.ones(6, np.float32)}
    some = FederatedData.of(["ann", "ben", "cem"], [3, 0, 3], columns)
    data = replace(make_data(), splits={"train": some, "test": some})
    run = kh.train(kh.Task(make_model(), data), rounds=1, m=3, **SETTINGS)
    assert len(run.records()[0].clients) == 2
    none = replace(data, splits={"train": some.subset([1]), "test": some})
    with pytest.raises(InputError, match="no client has this many examples: got min_examples 1"):
        kh.train(kh.Task(make_model(), none), rounds=1, m=3, **SETTINGS)


def test_updates_that_cannot_be_used_are_told(capsys):
    model = replace(make_model(), loss=lambda *given: _loss(*given) * np.float32("nan"))
    task = kh.Task(model, make_data(), metrics={"mse": mse})
    kh.train(task, rounds=2, m=5, **{**SETTINGS, "progress": True})
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert all("4 of 4 updates refused: not finite or too large" in line for line in lines)


def test_clients_whose_keys_meet_no_example_are_told(capsys):
    task = make_task(keys=lambda context: np.arange(context.max_keys))
    kh.train(task, rounds=1, m=1, **{**SETTINGS, "progress": True})
    assert "clients have no example with their keys" in capsys.readouterr().err


TASK = make_task(keys=kh.keys.random_top)
NAMED = "tests.front.test_train:TASK"


def test_a_task_by_name_brings_its_choice_and_its_data():
    spec = spec_of(NAMED, {"keys.item.count": 5})
    assert (spec.keys["item"].choice, spec.data) == (f"{NAMED}.choose.item", f"{NAMED}.data")
    assert resolve(f"{NAMED}.choose.item") is kh.keys.random_top
    assert open_data(spec) is TASK.data
    assert spec_of(NAMED).keys["item"].choice == "all"
    other = spec_of(NAMED, {"keys.item.choice": "top", "keys.item.count": 5})
    assert other.keys["item"].choice == "top"


KIND = replace(TASK.kind, holds={})


def test_a_count_of_keys_without_a_choice_is_refused():
    with pytest.raises(InputError, match="takes every key of 'item' and chooses none: got a coun"):
        spec_of("tests.front.test_train:KIND", {"keys.item.count": 5})
