"""An error in code of one's own says which function failed, of which client or in which round."""

import re

import numpy as np
import pytest

import keyhole as kh
from keyhole.aggregation.plain import PLAIN
from keyhole.aggregation.privacy.mechanism import Privacy
from keyhole.aggregation.robust import NormAlarm
from keyhole.cli import main as cli
from keyhole.errors import NoExamplesError
from keyhole.parts import failed_hook, own_frames
from keyhole.rounds.workers import portable

WORD = kh.KeySpace("word", 10)
ZEROS = {"w": np.zeros(10, np.float32)}


def fail(*_, **__):
    raise ZeroDivisionError("of my own")


class BadSum:
    about = PLAIN.about
    add = staticmethod(fail)


def run(choose=lambda own, context: WORD.keys([own]), train=None, sums=PLAIN, metrics=None, **more):
    train = train or (lambda slices, own, rng: {"w": slices["w"] - 1})
    clients = kh.Clients(4, data=lambda client: client, choose=choose, train=train)
    parts = kh.RunParts(kh.Cohorts(4, 4), {"word": 1}, aggregate=sums, **more)
    state = kh.ServerState.dense(kh.Layout.of(ZEROS, kh.Cut(WORD, {"w": 0})), ZEROS, kh.SGD(1.0))
    evaluation = None if metrics is None else kh.Evaluation(metrics)
    return list(kh.start_run(state, clients, parts).rounds(2, evaluation=evaluation))


def second(made):
    """Fails in the second round."""
    calls = iter([made] * 4 + [fail])

    def train(*args):
        return next(calls)(*args)

    return train


@pytest.mark.parametrize(
    ("own", "note"),
    [
        ({"choose": fail}, r"choose of client \d in round 0 has failed"),
        (
            {"train": second(lambda slices, own, rng: {"w": slices["w"]})},
            r"train of client \d in round 1 has failed",
        ),
        ({"sums": BadSum()}, "add of the sum in round 0 has failed"),
        ({"metrics": fail}, "computing metrics after server step 1 has failed"),
    ],
)
def test_the_note_says_which_hook_failed_and_where(own, note):
    with pytest.raises(ZeroDivisionError) as caught:
        run(**own)
    assert re.fullmatch(note, failed_hook(caught.value))
    frames = own_frames(caught.value)
    assert "in fail" in frames
    assert "keyhole/rounds" not in frames


def test_errors_of_the_library_stay_as_they_are():
    with pytest.raises(kh.KeyholeError) as caught:
        run(choose=lambda own, context: own)
    assert failed_hook(caught.value) is None


@pytest.mark.parametrize("returned", [None, kh.Report(None)])
def test_a_train_function_that_returns_no_update_ends_the_run_and_is_named(returned):
    with pytest.raises(kh.KeyholeError, match=r"train of client \d in round 0 has returned no up"):
        run(train=lambda slices, own, rng: returned)


@pytest.mark.parametrize("told", [(), ("client 3 has none",)])
def test_a_client_without_examples_may_be_told_in_any_words(told):
    def train(slices, own, rng):
        if own == 3:
            raise NoExamplesError(*told)
        return {"w": slices["w"]}

    assert [record.empty for record in run(train=train)] == [[3], [3]]


class Forgetful:
    about = PLAIN.about

    def __init__(self, returned):
        self.returned = returned

    def add(self, request):
        return self.returned

    def with_ring(self, ring, noise=0.0):
        return self


@pytest.mark.parametrize(("returned", "got"), [(None, "None"), ({}, "a dict")])
@pytest.mark.parametrize("wrap", [lambda own: own, NormAlarm])
@pytest.mark.parametrize("privacy", [None, Privacy(clip=1.0, noise=1.0)])
def test_a_sum_that_returns_none_is_named(returned, got, wrap, privacy):
    with pytest.raises(kh.KeyholeError, match=f"add of the sum in round 0 .*no sum: got {got};"):
        run(sums=wrap(Forgetful(returned)), privacy=privacy)


def test_an_error_from_a_worker_brings_the_lines_that_led_to_it():
    with pytest.raises(ZeroDivisionError) as caught:
        fail()
    sent = portable(caught.value).with_traceback(None)
    assert "in fail" in sent.__notes__[-1]


@pytest.mark.parametrize("asks", ["", "option", "variable"])
def test_the_command_shows_the_frames_of_the_user_or_all(asks, tmp_path, monkeypatch, capsys):
    (tmp_path / "mine_failing.py").write_text("def data(seed):\n    return int('three')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("KEYHOLE_CACHE", str(tmp_path))
    monkeypatch.setattr("keyhole.rounds.cores.use_one_thread", lambda: None)  # JAX has started
    if asks == "variable":
        monkeypatch.setenv("KEYHOLE_TRACEBACK", "1")
    words = ["--traceback"] if asks == "option" else []
    words += ["train", "movies", "--data", "mine_failing:data", "--out", str(tmp_path / "out")]
    with pytest.raises(ValueError if asks else SystemExit) as ended:
        cli.main(words)
    if asks:
        return
    assert ended.value.code == 1
    first, *frames, last = capsys.readouterr().err.splitlines()
    assert first.startswith("keyhole: data mine_failing:data has failed: ValueError: invalid")
    assert "mine_failing.py" in frames[0]
    assert "keyhole/" not in "".join(frames)
    assert "KEYHOLE_TRACEBACK=1" in last
