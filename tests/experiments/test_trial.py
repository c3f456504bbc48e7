"""The files of a trial: what is refused changes none of them, and what is damaged is one line."""

import json
import shutil
from dataclasses import replace

import pytest

from keyhole.errors import InputError, KeyholeError
from keyhole.experiments.experiment import Experiment
from keyhole.experiments.specs import spec_of
from keyhole.rounds.record import read_records
from tests.experiments.small import writers

DEEP = "[" * 100_000


def experiment(rounds=2, **changes):
    usual = {"rounds": rounds, "evaluate_every": 1, "cohort.size": 4, "client.lr": 0.05}
    sizes, keys = {"neurons": 16, "hidden": 8}, {"neuron": {"count": 8}}
    spec = spec_of("emnist_2nn", {**usual, **changes}, sizes=sizes, keys=keys)
    return Experiment(spec, writers())


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    directory = tmp_path_factory.mktemp("finished")
    return experiment().run(0, directory), directory


@pytest.fixture
def trial(finished, tmp_path):
    """A copy of a finished run of two rounds."""
    return shutil.copytree(finished[1], tmp_path / "trial")


def files(directory):
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def edit(path, *names, value):
    told = inner = json.loads(path.read_text())
    for name in names[:-1]:
        inner = inner[name]
    inner[names[-1]] = value
    path.write_text(json.dumps(told))


def with_another_train(made):
    """As if its code had been edited where no identity in the record sees it."""
    made.__dict__["clients"] = replace(made.clients, train=lambda *given: None)
    return made


def cut_the_log(trial):
    max(trial.glob("state/log-*.khl")).write_bytes(b"KHL")


@pytest.mark.parametrize(
    ("damage", "asked", "said"),
    [
        (cut_the_log, lambda: experiment(3), "is not a delta log"),
        (lambda _: None, lambda: with_another_train(experiment(3)), "another train"),
        (lambda t: (t / "run.json").unlink(), lambda: experiment(3), "expected run.json"),
        (lambda t: (t / "run.json").unlink(), lambda: experiment(3, seed=7), "expected run.json"),
        (
            lambda t: ((t / "run.json").unlink(), (t / "result.json").unlink()),
            lambda: experiment(3, seed=7),
            "expected run.json",
        ),
        (lambda t: (t / "run.json").unlink(), lambda: experiment(seed=7), "expected run.json"),
        (
            lambda t: edit(t / "run.json", "spec", "seed", value=7),
            lambda: experiment(seed=7),
            "the result of another run",
        ),
        (
            lambda t: (t / "records.jsonl").write_text(
                '{"round": "0", "step": 1, "clients": []}\n'
            ),
            lambda: experiment(3),
            "not the record of a round: got Expected `int`, got `str`",
        ),
    ],
    ids=[
        "damaged log",
        "another train",
        "no run.json",
        "no run.json, another seed",
        "state alone, another seed",
        "no run.json, another seed, as many rounds",
        "run.json edited",
        "records of another type",
    ],
)
def test_what_is_refused_changes_no_file_of_a_run(trial, damage, asked, said):
    damage(trial)
    before = files(trial)
    with pytest.raises(KeyholeError, match=said):
        asked().run(0, trial)
    assert files(trial) == before


def test_a_result_stays_until_a_further_round_is_made(trial):
    kept = [(trial / name).read_bytes() for name in ("run.json", "result.json")]

    def fail(clients, jobs):
        raise RuntimeError("no engine")

    with pytest.raises(RuntimeError, match="no engine"):
        experiment(3).run(0, trial, execute=fail)
    assert [(trial / name).read_bytes() for name in ("run.json", "result.json")] == kept

    def stop_at(record):
        if record.round == 2:
            assert not (trial / "result.json").exists()
            assert json.loads((trial / "run.json").read_text())["spec"]["rounds"] == 3

    assert experiment(3).run(0, trial, on_round=stop_at).rounds == 3


@pytest.mark.parametrize("text", ["{}", "[]", "{", '{"rounds": 2}', '{"spec": null}', "\xff", DEEP])
@pytest.mark.parametrize("name", ["run.json", "result.json"])
def test_a_damaged_file_is_refused_in_one_line_and_kept(trial, name, text):
    (trial / name).write_text(text, "latin-1")
    before = files(trial)
    with pytest.raises(InputError, match=r"is not as training|record of a run") as refused:
        experiment().run(0, trial)
    assert "\n" not in str(refused.value)
    assert "away" not in str(refused.value)
    assert files(trial) == before


@pytest.mark.parametrize(
    ("names", "value", "said"),
    [
        (("rounds",), "2", "Expected `int`, got `str` - at `rounds`"),
        (("metrics",), 5, "at `metrics`"),
        (("run",), None, "at `run`"),
    ],
)
def test_a_result_with_a_field_of_another_type_is_refused(trial, names, value, said):
    edit(trial / "result.json", *names, value=value)
    with pytest.raises(InputError, match=said):
        experiment().run(0, trial)


@pytest.mark.parametrize("text", ['{"seconds": "x"}', '{"seconds": null}', "[1]", "", "\xff", DEEP])
def test_a_damaged_clock_is_noted_and_refuses_nothing(trial, text):
    (trial / "clock.json").write_text(text, "latin-1")
    (trial / "result.json").unlink()
    told = []
    result = experiment().run(0, trial, on_note=told.append)
    assert told == result.notes
    assert "clock.json: the seconds of earlier rounds are lost" in told[0]
    assert json.loads((trial / "clock.json").read_text()) == {"seconds": result.seconds}


@pytest.mark.parametrize("kept", [b"", None, b"\xff\xfe\x00", 1], ids=repr)
def test_a_result_says_how_many_records_its_means_are_of(finished, trial, kept):
    path = trial / "records.jsonl"
    last = path.read_bytes().splitlines(keepends=True)[1]
    path.unlink()
    if kept is not None:
        path.write_bytes(last if kept == 1 else kept)
    told = []
    result = experiment(3).run(0, trial, on_note=told.append)
    assert (result.rounds, result.records) == (3, 2)
    assert told == result.notes == ["records.jsonl: " + told[0].partition(": ")[2]]
    assert "the records of 1 rounds are lost" in told[0]
    assert [record.round for record in read_records(path)] == [1, 2]
    again = []
    assert experiment(3).run(0, trial, on_note=again.append) == result
    assert again == told
    assert (finished[0].records, finished[0].notes) == (2, [])


def test_a_run_that_failed_before_its_first_round_stands_in_the_way_of_none(tmp_path):
    def fail(*given):
        raise ZeroDivisionError

    def own_choice(context):
        return list(range(context.max_keys))

    def asked(choice):
        made = experiment()
        return Experiment(made.spec, made.dataset, {"keys.neuron.choice": choice})

    notes = []
    with pytest.raises(ZeroDivisionError):
        asked(fail).run(0, tmp_path / "trial")
    done = asked(own_choice).run(0, tmp_path / "trial", on_note=notes.append)
    assert done == replace(asked(own_choice).run(0, tmp_path / "new"), seconds=done.seconds)
    assert [note.partition(":")[0] for note in notes] == [
        "no round had been made, so the run starts over"
    ]
    before = files(tmp_path / "trial")
    with pytest.raises(InputError, match=r"holds another run: got .*choose another directory"):
        asked(fail).run(0, tmp_path / "trial")
    assert files(tmp_path / "trial") == before
