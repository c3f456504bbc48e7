"""`keyhole publish`: a trained run becomes rounds that can be served."""

import json
import os
import re
import shutil
from urllib.request import urlopen

import click.testing
import numpy as np
import pytest

from keyhole.cli.publish import publish
from keyhole.data.open import make_synthetic
from keyhole.device.device import Device
from keyhole.errors import InputError, KeyholeError
from keyhole.front.train import open_run
from keyhole.server.snapshots import load_snapshot
from keyhole.service.reading import RoundsDirectory, verify_round
from tests.helpers import ROOT, assert_trees_equal
from tests.service.service_process import service

TINY = ("--size", "neurons=16", "--size", "hidden=8", "--cohort", "3", "--rounds", "2", "--m", "8")


@pytest.fixture(scope="module")
def trained(keyhole, few_writers, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs")
    done = keyhole("train", "emnist_2nn", *TINY, "--data", few_writers, "--out", out)
    assert done.returncode == 0, done.stderr
    return next(out.glob("*/trial-0"))


@pytest.fixture
def run(environment, few_writers, monkeypatch):
    """Runs the command in this process; returns what it says, or the error it ends with."""
    monkeypatch.setenv("KEYHOLE_CACHE", environment["KEYHOLE_CACHE"])

    def run(*args, data=few_writers):
        runner = click.testing.CliRunner()
        done = runner.invoke(publish, [*map(str, args), "--data", str(data)])
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        return done

    return run


def test_a_trained_model_is_served_as_it_was_trained(run, trained, tmp_path):
    said = json.loads(run(trained, tmp_path / "rounds", "--json").stdout)
    assert (said["number"], said["step"], said["slices"]) == (0, 2, 17)
    with RoundsDirectory(tmp_path / "rounds").hold(said["round"]) as found:
        verify_round(found)
        assert found.manifest.settings["keys_per_client"] == {"neuron": 8}
        assert [table.name for table in found.manifest.tables] == ["everyone", "neuron"]
        snapshot = max((trained / "state").glob("snapshot-*.khs"))
        state = load_snapshot(snapshot, found.manifest.layout).state
        for place, table in enumerate(found.tables):
            keys = np.arange(table.info.num_keys)
            rows = table.info.records.decode_rows(table.gather(keys).records)
            np.testing.assert_array_equal(rows, state.rows(place, keys))


def test_a_finished_run_opens_in_python_as_the_training_page_says(
    trained, environment, few_writers, monkeypatch, capsys, tmp_path
):
    monkeypatch.setenv("KEYHOLE_CACHE", environment["KEYHOLE_CACHE"])
    (code,) = re.findall(r"```py\n(.*?)```", (ROOT / "docs" / "training.md").read_text(), re.S)
    found = {}
    exec(code.replace("keyhole-runs/so_tag-top100-words/trial-0", str(trained)), found)
    assert capsys.readouterr().out.startswith("emnist_2nn 2 {")
    run = found["run"]
    snapshot = max((trained / "state").glob("snapshot-*.khs"))
    state = load_snapshot(snapshot, run.experiment.task.model.layout).state
    assert_trees_equal(run.model(), state.model())
    assert run.spec.rounds == len(run.records()) == 2
    with pytest.raises(InputError, match="holds a run with another dataset"):
        open_run(trained, data=make_synthetic("writers", 0, writers=6))
    shutil.copytree(trained, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "state")
    with pytest.raises(InputError, match="has no model: got no folder state"):
        open_run(tmp_path / "run").model()


def test_slices_on_demand_are_those_of_the_published_round(run, trained, environment, few_writers):
    """Each is computed once, as the metrics of the service say."""
    flags = ("--on-demand", "--coding", "uint8", "--data", few_writers)
    env = {**os.environ, **environment}
    rounds = trained.parent / "rounds"
    run(trained, rounds, "--coding", "uint8")
    with (
        service(rounds) as files,
        service(trained, *flags, env=env) as computed,
        Device(files.url) as published,
        Device(computed.url) as on_demand,
    ):
        for keys in ([3, 0, 3], [15], [], list(range(16))):
            found, expected = (
                device.fetch(device.current().round, {"neuron": np.array(keys, np.int64)}).model
                for device in (on_demand, published)
            )
            assert_trees_equal(found, expected)
        with urlopen(computed.metrics) as page:
            assert b"keyhole_select_evaluations_total 17.0" in page.read()


def test_one_process_serves_on_demand(trained, keyhole, few_writers):
    done = keyhole("serve", trained, "--on-demand", "--workers", 2, "--data", few_writers)
    assert done.returncode == 2
    assert "one process" in done.stderr


def test_publishing_again_makes_the_next_round(run, trained, tmp_path):
    for number in range(3):
        done = run(trained, tmp_path, "--coding", "uint8")
        assert f"round {number}-" in done.stdout
        assert "17 slices" in done.stdout
    current = RoundsDirectory(tmp_path).current()
    with RoundsDirectory(tmp_path).hold(current.round) as found:
        assert found.manifest.tables[1].coding == "uint8"
        assert len(found.manifest.tables[1].root) == 64


def test_a_directory_that_holds_no_run_is_refused(run, tmp_path):
    with pytest.raises(KeyholeError, match=r"holds no run: got no trial-N/run\.json"):
        run(tmp_path, tmp_path / "rounds")
    assert not (tmp_path / "rounds").exists()


def test_other_data_than_the_run_s_are_refused(run, trained, few_writers, tmp_path):
    with np.load(few_writers) as arrays:
        np.savez(tmp_path / "other.npz", **{**arrays, "images": 255 - arrays["images"]})
    with pytest.raises(KeyholeError, match="holds a run with another data"):
        run(trained, tmp_path / "rounds", data=tmp_path / "other.npz")
