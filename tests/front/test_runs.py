"""Runs are objects: opened again, measured, drawn, gone on with, and started from."""

import shutil
import signal
import sys

import numpy as np
import pytest

import keyhole as kh
from keyhole.data.open import make_synthetic
from keyhole.errors import InputError
from keyhole.experiments.experiment import Experiment
from keyhole.experiments.specs import spec_of
from tests.front.test_train import SETTINGS, make_task, mse

EACH_ROUND = {**SETTINGS, "evaluate_every": 1}


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "top5"
    return kh.train(make_task(), rounds=4, m=5, trials=2, out=out, **EACH_ROUND)


def test_an_opened_run_is_the_one_that_was_trained(kept):
    run = kh.open_run(kept.directory, task=make_task())
    assert (run.rounds, run.spec, run.metrics) == (4, kept.spec, kept.metrics)
    for trial in (0, 1):
        assert np.array_equal(run.model(trial)["score"], kept.model(trial)["score"])
    assert run.records(1) == kept.records(1) != run.records(0)
    assert repr(run) == repr(kept)
    (one,) = run.evaluate_spreads(trials=[1]).values()
    assert (one.mean, one.interval) == (pytest.approx(kept.trials[1].result.metrics["mse"]), None)
    both = run.evaluate_spreads()["mse"]
    assert both.interval == pytest.approx(run.spreads["mse"].interval)
    assert run.evaluate() == {"mse": both.mean}


def test_records_and_curves_need_no_task(kept):
    run = kh.open_run(kept.directory)
    at, values = run.curve("mse", against="bytes")
    assert values.shape == (2, 4)
    assert np.array_equal(at, kept.curve("mse", against="bytes")[0])
    with pytest.raises(InputError, match=r"pass it as open_run\(directory, task=task\)"):
        run.model()


def test_one_trial_opens_alone(kept):
    run = kh.open_run(kept.directory / "trial-1", task=make_task())
    assert [trial.number for trial in run.trials] == [1]
    assert np.array_equal(run.model()["score"], kept.model(1)["score"])


def test_another_task_is_refused(kept):
    def last(context):
        return context.counts.keys[-context.max_keys :]

    with pytest.raises(InputError, match="are not those that the run was started with"):
        kh.open_run(kept.directory, task=make_task(keys=last))


def pooled(split):
    """All examples of a split, client after client."""
    people = make_task().data.splits[split]
    own = [people.client(i) for i in range(len(people))]
    return {name: np.concatenate([each[name] for each in own]) for name in own[0]}


def test_metrics_can_be_thought_of_afterwards(kept):
    def bias(outputs, examples):
        return np.mean(outputs - examples["label"])

    models, test = [kept.model(trial)["score"] for trial in (0, 1)], pooled("test")
    found = kept.evaluate({"bias": bias, "mse": mse})
    biases = [np.mean(model[test["item"]] - test["label"]) for model in models]
    assert found["bias"] == pytest.approx(np.mean(biases), abs=1e-6)
    assert found["mse"] == pytest.approx(kept.evaluate()["mse"])
    train = pooled("train")
    errors = [np.mean((model[train["item"]] - train["label"]) ** 2) for model in models]
    assert kept.evaluate({"mse": mse}, "train") == {"mse": pytest.approx(np.mean(errors))}


@pytest.mark.parametrize(
    ("use", "said"),
    [
        (lambda run: run.evaluate({"own": lambda out, _: out}), "metric 'own' is no number"),
        (lambda run: run.evaluate({"own": lambda *_: "x"}), "got a str"),
        (lambda run: run.evaluate({"own": 3}), "metric 'own' is no function"),
        (lambda run: run.evaluate(split="tset"), "did you mean test?"),
        (lambda run: run.model(2), r"expected 0\.\.1"),
        (lambda run: run.curve("msee"), "did you mean mse?"),
        (lambda run: run.curve("mse", "time"), "expected rounds or bytes"),
        (lambda run: run.plot("mse", path="figure.doc"), r"ends in \.png, \.svg, \.pdf"),
        (lambda run: kh.open_run(run.directory.parent), "holds no run"),
    ],
)
def test_a_mistake_is_named(kept, use, said):
    with pytest.raises(InputError, match=said):
        use(kept)


def test_a_run_goes_on_to_the_same_bytes(kept, tmp_path):
    shutil.copytree(kept.directory, tmp_path / "run")
    further = kh.open_run(tmp_path / "run", task=make_task()).resume(7)
    at_once = kh.train(make_task(), rounds=7, m=5, trials=2, **EACH_ROUND)
    assert further.rounds == 7
    for trial in (0, 1):
        assert np.array_equal(further.model(trial)["score"], at_once.model(trial)["score"])
    assert kh.open_run(tmp_path / "run").metrics == at_once.metrics
    with pytest.raises(InputError, match="train with out=DIRECTORY"):
        at_once.resume(9)


def test_an_interrupted_run_says_what_it_keeps_and_where_it_resumes(tmp_path, capsys):
    def interrupt(trial, record):
        if record.round == 0:  # the next round counts as under way
            signal.raise_signal(signal.SIGINT)

    call = {"rounds": 4, "m": 5, "out": tmp_path / "run", **EACH_ROUND}
    kept = r"trial-0 keeps 2 finished rounds; the same call resumes it"
    with pytest.raises(KeyboardInterrupt, match=kept):
        kh.train(make_task(), **{**call, "progress": interrupt})
    kh.train(make_task(), **{**call, "progress": True})
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "trial 0: resumed after round 2/4"
    assert [line.partition(":")[0] for line in lines[1:]] == [
        "trial 0, round 3/4",
        "trial 0, round 4/4",
    ]


def test_an_interrupted_run_in_memory_says_that_it_is_lost():
    def interrupt(trial, record):
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt, match=r"is lost; with out=DIRECTORY the same call"):
        kh.train(make_task(), rounds=4, m=5, **{**EACH_ROUND, "progress": interrupt})


def test_a_cohort_larger_than_the_population_is_told(capsys):
    call = {**EACH_ROUND, "cohort": 5000, "progress": True}
    run = kh.train(make_task(), rounds=1, m=5, **call)
    assert len(run.records()[0].clients) == 8
    said = capsys.readouterr().err.splitlines()[0]
    assert said == "cohort is 5000 of 8 clients: every round asks all of them"


def test_a_run_starts_from_the_model_of_another(kept, tmp_path):
    """Rates of nearly zero leave each trial where it started."""
    still = {**EACH_ROUND, "client_lr": 1e-30}
    run = kh.train(make_task(), rounds=1, m=5, trials=2, start=kept, out=tmp_path / "a", **still)
    for trial in (0, 1):
        assert np.array_equal(run.model(trial)["score"], kept.model(trial)["score"])
    again = kh.train(make_task(), rounds=2, m=5, trials=2, start=kept, out=tmp_path / "a", **still)
    assert again.rounds == 2
    assert again.start == kept.label
    assert f"from {kept.label}" in repr(again)
    assert kh.open_run(tmp_path / "a", task=make_task()).resume(3).rounds == 3


def test_another_start_is_another_run(kept, tmp_path):
    call = {"rounds": 1, "m": 5, "out": tmp_path / "run", **EACH_ROUND}
    kh.train(make_task(), start=kept, **call)
    for other in (None, {"score": np.ones(60, np.float32)}):
        with pytest.raises(InputError, match="holds a run with another start"):
            kh.train(make_task(), start=other, **call)


def test_parameters_are_a_start_too():
    ones = {"score": np.ones(60, np.float32)}
    still = {**EACH_ROUND, "client_lr": 1e-30}
    run = kh.train(make_task(), rounds=1, m=5, trials=2, start=ones, **still)
    assert np.array_equal(run.model(1)["score"], ones["score"])


def test_three_trials_cannot_start_from_two(kept):
    with pytest.raises(InputError, match="too few trials: got 2; expected 1, or 3 or more"):
        kh.train(make_task(), rounds=1, m=5, trials=3, start=kept, **EACH_ROUND)


def test_a_start_of_another_shape_is_refused():
    with pytest.raises(kh.KeyholeError, match="score"):
        kh.train(make_task(), rounds=1, start={"score": np.ones(7, np.float32)}, **EACH_ROUND)


def test_a_frame_has_a_row_for_each_trial_and_round(kept):
    pytest.importorskip("pandas", reason="needs keyhole[data]")
    frame = kh.open_run(kept.directory).frame()
    assert frame.shape[0] == 8
    assert frame.groupby("trial")["round"].max().tolist() == [4, 4]
    last = frame[(frame.trial == 1) & (frame["round"] == 4)]
    assert last.mse.item() == kept.records(1)[-1].metrics["mse"]
    assert last.bytes_down.item() == np.mean(kept.records(1)[-1].bytes_down)


def test_without_pandas_the_extra_is_named(kept, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(InputError, match=r"keyhole\[data\]"):
        kept.frame()


def test_a_figure_is_written_as_its_ending_says(kept, tmp_path):
    for against in ("rounds", "bytes"):
        for ending in ("png", "svg", "pdf"):
            path = tmp_path / "new" / f"{against}.{ending}"
            figure = kept.plot("mse", against, path)
            assert path.stat().st_size > 1000
    (axes,) = figure.axes
    assert axes.get_ylabel() == "mse"
    assert len(axes.lines[0].get_xdata()) == 4


def test_a_run_of_a_shipped_task_finds_its_own_task_and_data(tmp_path):
    changes = {"rounds": 2, "evaluate_every": 1, "cohort.size": 2, "keys.neuron.count": 10}
    data = make_synthetic("writers", 0, writers=6)
    Experiment(spec_of("emnist_2nn", changes), data).run(0, tmp_path / "trial-0")
    run = kh.open_run(tmp_path, data=data)
    assert run.rounds == 2
    assert run.evaluate()["accuracy"] == pytest.approx(run.metrics["accuracy"])
    with pytest.raises(InputError, match="task emnist_2nn tells no outputs"):
        run.evaluate({"mine": mse})
    with pytest.raises(InputError, match="holds a run with another dataset"):
        kh.open_run(tmp_path, data=make_synthetic("writers", 0, writers=7))
