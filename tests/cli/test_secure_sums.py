"""The options of `keyhole train` that say how updates are added up."""

import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from keyhole.aggregation import aggregation_names
from keyhole.cli.train import train
from keyhole.delivery import delivery_names
from keyhole.errors import InputError
from keyhole.experiments.specs import name_of, spec_of
from keyhole.rounds.record import read_records
from keyhole.server.store import recover
from tests.helpers import ROOT

AGGREGATIONS = aggregation_names(lambda about: not about.is_robust)

pytest.importorskip("dp_accounting")

TASK = ("so_tag", "--size", "words=300", "--size", "tags=10", "--m", "20", "--cohort", "4")
NOISE = ("--dp-noise", "1", "--dp-clip", "1", "--dp-delta", "1e-3")


def invoke(*args, rounds=1, out="runs"):
    """In this process: what is compiled is kept."""
    line = [*TASK, "--rounds", rounds, "--out", out, *args]
    return CliRunner().invoke(train, list(map(str, line)), catch_exceptions=False)


def run(tmp_path, *args, rounds=1):
    done = invoke(*args, "--json", rounds=rounds, out=tmp_path)
    assert done.exit_code == 0, done.output
    (row,) = json.loads(done.stdout)
    return row, read_records(Path(row["directory"]) / "records.jsonl")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--ring-bits", "16"], "--ring-bits goes with a secure --aggregation"),
        (["--ring-bits", "24", "--aggregation", "secure-dense"], "'24' is not one of '16', '32'"),
        (["--value-clip", "2", "--aggregation", "dense"], "--value-clip goes with a secure"),
        (["--signed"], "--signed goes with --aggregation secure-dense, secure-sketch"),
        (["--signed", "--aggregation", "secure-sparse"], "--signed goes with"),
        (["--value-clip", "2", "--aggregation", "secure-dense", *NOISE], "does nothing beside"),
        (["--dp-noise", "1"], "takes --dp-noise and --dp-clip"),
        (["--dp-threshold", "5", *NOISE], "--dp-threshold goes with --dp-kind thresholded"),
        (["--dp-bands", "5", *NOISE], "--dp-bands goes with --dp-kind correlated"),
        (["--signed", "--aggregation", "secure-dense", "--devices", "d"], "take --aggregators"),
        (["--above-norm", "clip"], "--above-norm goes with --max-update-norm"),
        (
            *(["--aggregation", "secure-dense", "--max-update-norm", "1", "--above-norm", "clip"],),
            "a secure sum shows nobody",
        ),
        (["--trim", "0.1"], "--trim goes with --aggregation trimmed-mean"),
        (["--trim", "0.1", "--aggregation", "median"], "--trim goes with"),
        (["--untouched", "zeros"], "--untouched goes with --aggregation trimmed-mean, median"),
        (
            [*("--aggregation", "median", "--untouched", "zeros"), "--mean-over", "choosers"],
            "--untouched zeros goes with --mean-over cohort",
        ),
        (["--norm-alarm", "3", "--aggregation", "secure-sparse"], "a secure sum shows nobody"),
        (["--count-noise", "1"], "--count-noise goes with --min-clients-per-key"),
        (
            ["--min-clients-per-key", "2", "--aggregation", "secure-sparse", *NOISE],
            "take --dp-kind thresholded",
        ),
    ],
)
def test_options_that_would_do_nothing_are_refused(args, said, tmp_path):
    done = invoke(*args, out=tmp_path / "runs")
    assert done.exit_code == 2
    assert said in " ".join(done.output.split())
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ([*NOISE, "--mean-over", "choosers"], "divisor"),
        (["--min-clients-per-key", "2"], "a sum that opens every row"),
        (
            ["--min-clients-per-key", "2", "--aggregation", "secure-dense"],
            "expected secure-sparse",
        ),
        ([*NOISE, "--dp-kind", "thresholded"], "too small for thresholded rows"),
        (
            [*NOISE, "--dp-kind", "correlated", "--sampling", "cyclic", "--dp-bands", "2"],
            "2 bands",
        ),
    ],
)
def test_what_no_round_can_keep_is_refused_before_the_first(args, said, tmp_path):
    with pytest.raises(InputError, match=said):
        invoke(*args, out=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_a_ring_of_16_bits_halves_what_is_sent_and_signatures_add_to_it(tmp_path):
    sent, names = {}, set()
    for args in ([], ["--ring-bits", "16"], ["--signed"]):
        row, (record,) = run(tmp_path, "--aggregation", "secure-dense", *args)
        sent[" ".join(args)] = min(record.bytes_up)
        names.add(Path(row["directory"]).parent.name)
        described = json.loads((Path(row["directory"]) / "run.json").read_text())
        assert described["spec"]["aggregation"]["ring_bits"] == (
            16 if "--ring-bits" in args else 32
        )
    assert sent["--ring-bits 16"] < 0.6 * sent[""]
    assert sent["--signed"] >= sent[""] + 64
    assert len(names) == 3, "runs of their own"


@pytest.mark.parametrize(
    ("args", "title"),
    [
        pytest.param(
            ["--aggregation", "trimmed-mean", "--trim", "0.3"],
            "trimmed mean",
            marks=pytest.mark.slow,
        ),
        (["--aggregation", "median", "--untouched", "zeros"], "coordinate median"),
        (["--norm-alarm", "1.01", "--max-update-norm", "99", "--above-norm", "clip"], "plain sum"),
    ],
)
def test_robust_sums_and_the_bound_are_kept_in_what_a_run_says(tmp_path, args, title):
    row, (record,) = run(tmp_path, *args)
    assert record.seen_in_sum == {"server": "each update, its keys and whose they are"}
    assert record.input_bound == ("checked" if "--max-update-norm" in args else "none")
    assert (record.outliers > 0) == ("--norm-alarm" in args)
    told = json.loads((Path(row["directory"]) / "run.json").read_text())
    assert told["titles"]["aggregation"] == title
    done = invoke(*args, out=tmp_path)
    assert "each update, its keys and whose they are" in " ".join(
        done.output.replace("│", " ").split()
    )


def test_rows_of_few_are_dropped_and_the_run_records_how_many(tmp_path):
    dropped = {}
    for least in (1, 2, 4):
        args = ["--aggregation", "secure-sparse", "--min-clients-per-key", least]
        _, (record,) = run(tmp_path, *args)
        dropped[least] = record.dropped_rows
        assert "how many chose each key" in record.seen_in_sum["first server"]
    assert 0 == dropped[1] < dropped[2] < dropped[4]
    args = ["--aggregation", "secure-sparse", "--min-clients-per-key", 2, "--count-noise", 3]
    row, (noisy,) = run(tmp_path, *args)
    assert noisy.dropped_rows not in (0, dropped[2])
    assert "perkey2-counts3" in row["directory"]


def test_what_was_spent_is_shown_and_kept(tmp_path):
    args = [*NOISE, "--sampling", "cyclic", "--dp-kind", "correlated", "--dp-bands", "2"]
    row, records = run(tmp_path, *args, rounds=3)
    assert [record.privacy["rounds"] for record in records] == [1, 2, 3]
    assert row["privacy"] == records[-1].privacy
    said = invoke(*args, rounds=3, out=tmp_path).output
    epsilon = records[-1].privacy["epsilon"]
    assert f"privacy spent: epsilon {epsilon:.4g} at delta 0.001 after 3 rounds" in said
    assert "one client (add-or-remove, separated cohorts; simulated" in said


def test_arms_keep_apart_what_is_added_up_otherwise():
    arms = [
        name_of(spec_of("so_tag", {"aggregation.name": "secure-dense", **more}))
        for more in (
            {},
            {"aggregation.ring_bits": 16},
            {"aggregation.signed": True},
            {"privacy": {"noise": 1.0, "clip": 1.0}},
            {"privacy": {"noise": 1.0, "clip": 1.0, "kind": "thresholded"}},
        )
    ]
    assert len(set(arms)) == len(arms)


WITHOUT_NOISE = {
    "none": [],
    "all-rows": ["--dp-noise", "0", "--dp-clip", "inf"],
    "thresholded": ["--dp-noise", "0", "--dp-clip", "inf", "--dp-kind", "thresholded"],
    "correlated": ["--dp-noise", "0", "--dp-clip", "inf", "--dp-kind", "correlated"],
}


def model_of(tmp_path, delivery, way, kind):
    sampling = ["--sampling", "cyclic"] if kind == "correlated" else []
    args = ["--delivery", delivery, "--aggregation", way, *WITHOUT_NOISE[kind], *sampling]
    args += ["--force"] * (delivery in delivery_names()[3:])
    args += ["--allow-simulation"] * (delivery == "enclave")
    row, _ = run(tmp_path / f"{delivery}-{way}-{kind}", *args)
    from keyhole.models.logistic import tag_regression

    layout = tag_regression(300, 10).layout
    found = recover(Path(row["directory"]) / "state", layout)
    try:
        return found.state.model()
    finally:
        found.store.close()


@pytest.mark.slow
@pytest.mark.parametrize("delivery", delivery_names())
def test_every_combination_runs_and_gives_the_plain_model(delivery, tmp_path):
    """By the command itself: each delivery with each aggregation, and kinds of noise in turn. All
    combinations of the three are in tests/aggregation/test_every_way.py."""
    plain = {
        kind: model_of(tmp_path / "plain", "on-demand", "plain", kind)
        for kind in ("none", "correlated")
    }
    for place, way in enumerate(AGGREGATIONS):
        kind = list(WITHOUT_NOISE)[(place + delivery_names().index(delivery)) % len(WITHOUT_NOISE)]
        model = model_of(tmp_path, delivery, way, kind)
        for name, leaf in plain["correlated" if kind == "correlated" else "none"].items():
            np.testing.assert_allclose(model[name], leaf, rtol=1e-5, atol=1e-5)


def commands_of(page):
    """What a page tells people to type; a command that ends in dots is not whole."""
    blocks = re.findall(r"```sh\n(.*?)```", page.read_text(), re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    whole = [line for line in lines if not line.endswith("...")]
    return [shlex.split(line, comments=True) for line in whole if line.startswith("keyhole train")]


@pytest.mark.slow
@pytest.mark.parametrize("page", ["secure-sums.md", "trust.md"])
def test_every_command_of_the_docs_runs(page, tmp_path):
    """With fewer clients and rounds."""
    commands = commands_of(ROOT / "docs" / page)
    assert len(commands) == {"secure-sums.md": 6, "trust.md": 0}[page]
    for place, (_, _, *args) in enumerate(commands):
        short = ["--rounds", "5", "--cohort", "30", "--out", str(tmp_path / str(place)), "--json"]
        done = CliRunner().invoke(train, [*args, *short], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        (row,) = json.loads(done.stdout)
        records = read_records(Path(row["directory"]) / "records.jsonl")
        assert [record.not_opened for record in records] == [None] * 5
        if "--dp-noise" in args:
            assert records[-1].privacy["epsilon"] > 0
