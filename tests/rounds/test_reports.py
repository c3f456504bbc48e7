"""Reports: weights, metrics and states of clients, through rounds to the record."""

from dataclasses import replace

import numpy as np
import pytest

import keyhole as kh
from keyhole.aggregation import aggregation_named
from keyhole.aggregation.base import Rounding
from keyhole.aggregation.plain import DENSE, PLAIN
from keyhole.aggregation.privacy.mechanism import Privacy
from keyhole.aggregation.robust import MEDIAN
from keyhole.errors import InputError, StorageError
from keyhole.primitives.report import unpack_state
from keyhole.rounds.carried import Carried
from keyhole.rounds.loop import resume_run, start_run
from keyhole.rounds.machine import Buffering
from keyhole.rounds.record import decode_records, encode_records
from keyhole.sampling import Cohorts
from keyhole.server.row_sums import RowUpdate
from tests.helpers import load_example
from tests.rounds import toy

SECURE = aggregation_named("secure-dense", Rounding())


def reporting(**told):
    """The toy's clients, which report more than an update: functions of examples and context."""

    def train(submodel, examples, rng, context):
        found = {name: tell(examples, context) for name, tell in told.items()}
        return kh.Report(toy.train(submodel, examples, rng), **found)

    return replace(toy.make_clients(), train=train)


def counting(examples, context):
    """A state that holds how often a client took part, and where its keys were in each round."""
    held = context.state or {"rounds": np.zeros(0, np.int64), "keys": []}
    keys = context.keys["feature"].array
    return {
        "rounds": np.append(held["rounds"], context.round),
        "keys": [*held["keys"], keys],
    }


def by_state(submodel, examples, rng, context):
    """Trains, and moves by how often the client took part."""
    state = counting(examples, context)
    update = toy.train(submodel, examples, rng)
    return kh.Report({"x": update["x"] * np.float32(len(state["rounds"]))}, state=state)


def run(clients, rounds=2, directory=None, **plan):
    made = start_run(toy.make_state(), clients, toy.make_plan(**plan), directory)
    records = list(made.rounds(rounds))
    return made, records


def model(made):
    return made.state.model()["x"]


SIZES = {"weight": lambda examples, _: len(examples)}
LOSS = {"metrics": lambda examples, context: {"loss": len(examples) / 8 + context.client / 100}}


@pytest.mark.parametrize("aggregate", [PLAIN, DENSE, SECURE], ids=lambda a: a.about.name)
def test_equal_weights_give_the_mean_over_the_cohort(aggregate):
    alike = reporting(weight=lambda examples, _: 4)
    weighted, _ = run(alike, over="examples", max_weight=4.0, aggregate=aggregate)
    np.testing.assert_allclose(model(weighted), model(run(toy.make_clients())[0]), atol=1e-5)


@pytest.mark.parametrize("aggregate", [PLAIN, SECURE], ids=lambda a: a.about.name)
def test_a_weighted_mean_is_that_of_the_primitives(aggregate):
    """One round by hand: `kh.aggregate_weighted_mean` of updates that are put in place."""
    told = {}

    def train(submodel, examples, rng, context):
        update = toy.train(submodel, examples, rng)
        told[context.client] = toy.LAYOUT.deselect(update, context.keys), len(examples)
        return kh.Report(update, weight=len(examples))

    clients = replace(toy.make_clients(), train=train)
    made, (record,) = run(clients, 1, over="examples", max_weight=64.0, aggregate=aggregate)
    updates = kh.at_clients({c: update for c, (update, _) in told.items()})
    weights = kh.at_clients({c: float(n) for c, (_, n) in told.items()})
    expected = kh.aggregate_weighted_mean(updates, weights).value
    np.testing.assert_allclose(-model(made), expected["x"], atol=1e-5)
    assert record.total_weight == pytest.approx(sum(n for _, n in told.values()), rel=1e-4)


def test_a_client_that_tells_no_weight_counts_by_its_examples():
    told, counted = (
        run(clients, over="examples")[0] for clients in (reporting(**SIZES), toy.make_clients())
    )
    assert model(told).tobytes() == model(counted).tobytes()


def test_a_larger_weight_than_the_max_counts_as_the_max():
    capped = reporting(weight=lambda examples, _: 1000)
    _, records = run(capped, over="examples", max_weight=2.0)
    assert records[0].total_weight == 2.0 * len(records[0].clients)


def test_metrics_have_mean_and_deciles_in_the_clear():
    _, (record, _) = run(reporting(**LOSS))
    found = record.client_metrics["loss"]
    values = [len(toy.EXAMPLES[c]) / 8 + c / 100 for c in record.clients]
    assert found.mean == pytest.approx(np.mean(values))
    assert found.deciles[4] == pytest.approx(np.median(values))
    assert len(found.deciles) == 9
    assert decode_records(encode_records([record])) == [record]


def test_metrics_of_a_weighted_run_are_weighted_too():
    _, (record, _) = run(reporting(**SIZES, **LOSS), over="examples")
    sizes = [len(toy.EXAMPLES[c]) for c in record.clients]
    values = [n / 8 + c / 100 for n, c in zip(sizes, record.clients, strict=True)]
    expected = np.average(values, weights=sizes)
    assert record.client_metrics["loss"].mean == pytest.approx(expected)


def test_a_secure_sum_tells_the_mean_alone_and_trains_the_same():
    clients = reporting(**SIZES, **LOSS)
    weighted = {"over": "examples", "max_weight": 64.0, "sum_metrics": {"loss": 100.0}}
    plain, secure = (run(clients, aggregate=each, **weighted) for each in (PLAIN, SECURE))
    np.testing.assert_allclose(model(plain[0]), model(secure[0]), atol=1e-5)
    found, seen = (made[1][0].client_metrics["loss"] for made in (plain, secure))
    assert seen.mean == pytest.approx(found.mean, abs=1e-4)
    assert seen.deciles == []


def test_a_metric_that_is_no_finite_number_is_left_out():
    clients = reporting(
        metrics=lambda _, c: {"loss": np.nan if c.client % 2 else 1.0, "nan": np.inf}
    )
    for aggregate in (PLAIN, SECURE):
        _, (record, _) = run(clients, aggregate=aggregate, sum_metrics={"loss": 2.0, "nan": 1.0})
        assert record.client_metrics["loss"].mean == pytest.approx(1.0, abs=1e-4)
        assert "nan" not in record.client_metrics


def test_a_secure_sum_tells_no_metric_that_the_run_does_not_name():
    _, (record, _) = run(reporting(**LOSS), aggregate=SECURE)
    assert not record.client_metrics


def test_what_a_secure_sum_carries_is_not_cut_off_where_updates_are():
    """Numbers of an update are clipped to 0.5, and weights and losses are larger."""
    small = aggregation_named("secure-dense", Rounding(clip=0.5))
    told = reporting(weight=lambda *_: 4, metrics=lambda *_: {"loss": 300.0, "large": 3.0})
    _, (record,) = run(
        told,
        1,
        aggregate=small,
        over="examples",
        max_weight=4.0,
        sum_metrics={"loss": 1000.0, "large": 2.0},
    )
    assert record.total_weight == pytest.approx(4 * len(record.clients), rel=1e-4)
    assert record.client_metrics["loss"].mean == pytest.approx(300, rel=1e-4)
    assert record.client_metrics["large"].mean == pytest.approx(2.0, rel=1e-4)  # its max


def test_a_metric_that_a_secure_sum_needs_and_a_client_lacks_is_named():
    with pytest.raises(InputError, match=r"client \d+ in round 0 reports no metric 'accuracy'"):
        run(reporting(**LOSS), aggregate=SECURE, sum_metrics={"accuracy": 1.0})
    promised = Privacy(clip=1.0, noise=1.0)
    with pytest.raises(InputError, match="the privacy account covers no metrics: got loss"):
        run(reporting(**LOSS), privacy=promised, sum_metrics={"loss": 1.0})


def test_records_without_reports_have_the_fields_that_they_had():
    _, (record, _) = run(toy.make_clients())
    assert b"client_metrics" not in encode_records([record])
    assert b"total_weight" not in encode_records([record])


def test_reports_are_silent_where_privacy_is_promised():
    promised = {"privacy": Privacy(clip=1.0, noise=1.0), "over": "examples", "max_weight": 64.0}
    _, (record,) = run(reporting(**SIZES, **LOSS), 1, cohorts=Cohorts(20, 5, "poisson"), **promised)
    assert not record.client_metrics
    assert record.total_weight is None


def test_numbers_more_leave_the_rows_of_the_model_as_they_are():
    """The layout of reports, with and without a part that everybody receives."""
    word = kh.KeySpace("word", 5)
    trees = {"w": np.ones((5, 2), np.float32)}, {"b": np.ones(3, np.float32)}
    for like in (trees[0], trees[0] | trees[1], np.ones((5, 2), np.float32)):
        cut = kh.Cut(word, {"w" if isinstance(like, dict) else ".": 0})
        layout = kh.Layout.of(like, cut)
        carried = Carried(metrics={"loss": 10.0}, unit=8.0)
        wide, told = carried.layout(layout), kh.Report(None, 0.5, {"loss": 5.0})
        update = carried.put(layout.select(like, word.keys([4, 1])), told, "client 0")
        wide.check(update, {"word": word.keys([4, 1])})
        assert update["report"].tolist() == [4.0, 2.0, 4.0]
        rows = tuple(
            RowUpdate(
                np.arange(n := part.space.num_keys), np.ones((n, part.slice_size), np.float32)
            )
            for part in wide.parts
        )
        left, reported = carried.split(layout, rows)
        assert reported.metrics["loss"].mean == 10.0
        assert [u.rows.shape[1] for u in left] == [part.slice_size for part in layout.parts]


REFUSED = {
    "the weight of client": ("weight", [-1, np.nan, np.ones(2), "many"]),
    "metric 'loss' of client": ("metrics", [{"loss": np.ones(3)}, {"loss": None}]),
    "the metrics of client": ("metrics", [[1.0]]),
    "the state of client": (
        "state",
        [b"bytes", {"a": "text"}, {1: np.ones(2)}, {"a": (np.ones(1),)}],
    ),
}


@pytest.mark.parametrize("wrong", REFUSED)
def test_what_is_no_report_is_refused_with_client_and_round(wrong):
    name, values = REFUSED[wrong]
    for value in values:
        with pytest.raises(InputError, match=f"{wrong} \\d+ in round 0"):
            run(reporting(**{name: lambda *_, value=value: value}))


def test_metrics_of_other_names_are_refused_with_client_and_round():
    named = reporting(metrics=lambda _, context: {f"loss{context.client % 2}": 1.0})
    with pytest.raises(InputError, match=r"client \d+ reports other metrics in round 0"):
        run(named)


def test_a_state_larger_than_the_max_is_refused():
    large = replace(reporting(state=lambda *_: {"a": np.zeros(1000)}), max_state_bytes=1000)
    with pytest.raises(InputError, match=r"client \d+ in round 0 is too large: got 8\d+ bytes"):
        run(large)


def test_weights_without_a_bound_are_refused_where_one_is_promised():
    for bound in (
        {"aggregate": SECURE},
        {"privacy": Privacy(clip=1.0, noise=1.0)},
        {"max_update_norm": 1.0},
    ):
        with pytest.raises(InputError, match="a weight without a bound"):
            run(reporting(**SIZES), over="examples", **bound)
    with pytest.raises(InputError, match="robust"):
        run(reporting(**SIZES), over="examples", aggregate=MEDIAN)


def test_weights_that_add_up_to_nothing_make_no_step():
    made, records = run(reporting(weight=lambda *_: 0), over="examples")
    assert made.state.steps == 0
    assert "add up to nothing" in records[0].not_opened


def test_a_client_gets_the_state_back_that_it_reported_last():
    clients = replace(toy.make_clients(), train=by_state)
    made, records = run(clients, 6)
    for client in {c for record in records for c in record.clients}:
        took = [record.round for record in records if client in record.clients]
        asked = made.clients.states.get(client)
        assert asked is not None
        assert unpack_state(asked, "x")["rounds"].tolist() == took


@pytest.mark.parametrize("buffering", [None, Buffering(7, 4)], ids=["rounds", "asynchronous"])
def test_states_resume_to_the_same_bytes(tmp_path, buffering):
    clients = replace(toy.make_clients(), train=by_state)
    whole, records = run(clients, 6, buffering=buffering)
    first, _ = run(clients, 3, tmp_path / "run", buffering=buffering)
    first.close()
    files = sorted(path.name for path in (tmp_path / "run/clients").iterdir())
    (tmp_path / "run/clients" / "19-3").write_bytes(b"of a round that was not committed")
    (tmp_path / "run/clients" / "18-3.tmp").write_bytes(b"torn")
    plan = toy.make_plan(buffering=buffering)
    resumed = resume_run(toy.make_state(), clients, plan, tmp_path / "run")
    assert sorted(path.name for path in (tmp_path / "run/clients").iterdir()) == files
    list(resumed.rounds(6))
    resumed.close()
    assert resumed.records == records
    assert model(resumed).tobytes() == model(whole).tobytes()
    kept = [path.name.partition("-")[0] for path in (tmp_path / "run/clients").iterdir()]
    assert len(kept) == len(set(kept))


def test_a_round_without_a_step_keeps_no_state():
    made, _ = run(reporting(weight=lambda *_: 0, state=counting), 1, over="examples")
    assert all(made.clients.states.get(client) is None for client in range(20))


def test_a_damaged_state_is_named(tmp_path):
    clients = replace(toy.make_clients(), train=by_state)
    made, _ = run(clients, 1, tmp_path / "run")
    for path in (tmp_path / "run/clients").iterdir():
        path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(StorageError, match=r"client \d+ in round \d+ is damaged"):
        list(made.rounds(20))
    made.close()


def test_a_model_says_how_much_a_client_may_keep():
    example = load_example("scaffold")
    small = type("Small", (example.Scaffold,), {"max_state_bytes": 100})()
    task = kh.Task(small, example.make_data())
    with pytest.raises(InputError, match=r"client \d+ in round 0 is too large: got \d+ bytes"):
        kh.train(task, rounds=1, cohort=5, m=20, progress=False)


def test_client_metrics_are_in_frames_curves_and_on_the_screen(capsys):
    pytest.importorskip("pandas", reason="pandas is not installed: pip install 'keyhole[data]'")
    example = load_example("scaffold")
    task = kh.Task(example.Scaffold(), example.make_data())
    settings = {"cohort": 5, "m": 20, "client_lr": 1.0, "mean_over": "examples"}
    made = kh.train(task, rounds=3, **settings)
    told = [record.client_metrics["loss"].mean for record in made.records()]
    assert made.frame()["client_loss"].tolist() == told
    assert made.curve("client_loss")[1].tolist() == [told]
    assert (made.frame()["total_weight"] > 0).all()
    assert f"client_loss {told[-1]:.4g}" in capsys.readouterr().err
