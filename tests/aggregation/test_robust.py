"""Robust sums: equal to their definitions, number by number; the simpler thing in limit cases."""

import logging
from dataclasses import replace
from math import ceil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import keyhole as kh
from keyhole.aggregation import aggregation_named, aggregation_names, robust
from keyhole.aggregation.base import about_of, rows_of
from keyhole.aggregation.plain import PLAIN
from keyhole.aggregation.privacy.mechanism import Privacy
from keyhole.aggregation.robust import MEDIAN, NormAlarm, TrimmedMean
from keyhole.errors import InputError
from keyhole.pricing import Workload
from keyhole.rounds.loop import start_run
from keyhole.rounds.machine import Buffering
from keyhole.rounds.round import in_process
from tests.aggregation.test_aggregation import dense, request_of
from tests.aggregation.test_inputs import Blocks, boosting, run_crowd
from tests.helpers import LAYOUTS, SEEDS
from tests.rounds import toy

SHARES = st.sampled_from([0.0, 0.1, 0.2, 0.25, 0.4, 0.5])
OVERS = ["cohort", "choosers", "nothing"]
SENT = ("sent",) * 7


def by_definition(request, share, untouched):
    """The slow twin: a loop over keys and numbers of a dense model."""
    sent = request.sent
    tables = [rows_of(request.layout, one) for one in sent]
    found = []
    for place, part in enumerate(request.layout.parts):
        whole = np.zeros((part.space.num_keys, part.slice_size))
        for key, number in np.ndindex(*whole.shape):
            own = [dict(zip(t[place][0].tolist(), t[place][1], strict=True)) for t in tables]
            values = [float(rows[key][number]) for rows in own if key in rows]
            chose = len(values)
            if untouched == "zeros":
                values += [0.0] * (len(sent) - chose)
            if not values:
                continue
            cut = min(ceil(share * len(values) - 1e-9), (len(values) - 1) // 2)
            kept = sorted(values)[cut : len(values) - cut]
            weight = len(values)  # how many the mean is of: divided by N, by itself, or not at all
            by = {"cohort": weight / len(sent), "choosers": 1, "nothing": weight}[request.over]
            whole[key, number] = by * sum(kept) / len(kept)
        found.append(whole)
    return found


@pytest.mark.parametrize(
    ("over", "untouched"),
    [*((over, "left-out") for over in OVERS), ("cohort", "zeros"), ("nothing", "zeros")],
)
@settings(max_examples=8)
@given(name=st.sampled_from(sorted(LAYOUTS)), seed=SEEDS, share=SHARES)
def test_a_robust_sum_is_its_definition(over, untouched, name, seed, share):
    request = request_of(name, seed, over, SENT)
    found = dense(request.layout, TrimmedMean(share, untouched).add(request).rows)
    for one, other in zip(found, by_definition(request, share, untouched), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@settings(max_examples=10)
@given(name=st.sampled_from(sorted(LAYOUTS)), seed=SEEDS, share=st.sampled_from([0.0, 0.2, 0.4]))
def test_with_zeros_it_is_deselect_with_the_primitive(name, seed, share):
    """Where clients that did not choose a key count as zeros, the sum is section 2's Aggregate*."""
    request = request_of(name, seed, "cohort", SENT)
    found = dense(request.layout, TrimmedMean(share, "zeros").add(request).rows)
    median = dense(request.layout, TrimmedMean(0.5, "zeros").add(request).rows)
    for place, part in enumerate(request.layout.parts):
        wide = np.zeros((len(request.sent), part.space.num_keys, part.slice_size), np.float32)
        for own, one in zip(wide, request.sent, strict=True):
            keys, rows = rows_of(request.layout, one)[place]
            own[keys] = rows
        placed = kh.at_clients(list(wide))
        expected = kh.aggregate_trimmed_mean(placed, trim=share).value
        np.testing.assert_allclose(found[place], expected, rtol=1e-5, atol=1e-6)
        expected = kh.aggregate_median(placed).value
        np.testing.assert_allclose(median[place], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("untouched", ["left-out", "zeros"])
@settings(max_examples=10)
@given(name=st.sampled_from(sorted(LAYOUTS)), seed=SEEDS)
def test_trimming_nothing_is_the_plain_mean(untouched, name, seed):
    request = request_of(name, seed, "cohort", SENT)
    found, plain = (s.add(request).rows for s in (TrimmedMean(0.0, untouched), PLAIN))
    sums = (dense(request.layout, rows) for rows in (found, plain))
    for one, other in zip(*sums, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("way", [MEDIAN, TrimmedMean(0.3)])
def test_of_one_client_it_is_its_update(way):
    request = request_of("two key spaces", 3, "cohort", ("sent", "late", "lost_before"))
    for one, other in zip(way.add(request).rows, PLAIN.add(request).rows, strict=True):
        np.testing.assert_array_equal(one.keys, other.keys)
        np.testing.assert_array_equal(one.rows, other.rows)


@pytest.mark.parametrize("over", OVERS)
def test_of_equal_updates_it_is_the_plain_sum(over):
    request = request_of("rows with a broadcast bias", 3, over, ("sent",))
    request = replace(request, results=[replace(request.sent[0], client=c) for c in range(9)])
    for way in (MEDIAN, TrimmedMean(0.3), TrimmedMean(0.0)):
        for one, other in zip(way.add(request).rows, PLAIN.add(request).rows, strict=True):
            np.testing.assert_allclose(one.rows, other.rows, rtol=1e-6)


@given(seed=SEEDS, boost=st.floats(-1e9, 1e9))
def test_fewer_liars_than_are_trimmed_stay_within_what_honest_clients_say(seed, boost):
    """Everyone has the bias: of ten, two lie, and two are left out at each end."""
    request = request_of("rows with a broadcast bias", seed, "choosers", ("sent",) * 10)
    place = next(i for i, p in enumerate(request.layout.parts) if not p.product.factors)
    honest = np.stack([rows_of(request.layout, one)[place][1][0] for one in request.sent[2:]])
    lying = [
        replace(one, update={**one.update, "bias": np.full(3, boost, np.float32)})
        for one in request.sent[:2]
    ]
    request = replace(request, results=[*lying, *request.sent[2:]])
    for way in (TrimmedMean(0.2), MEDIAN):
        found = way.add(request).rows[place].rows[0]
        assert (honest.min(0) - 1e-6 <= found).all()
        assert (found <= honest.max(0) + 1e-6).all()


def test_a_key_of_one_client_is_its_own_unless_others_count_as_zeros():
    word = kh.KeySpace("row", 7)
    request = request_of("rows", 0, "cohort", ("sent",) * 5)
    only = word.keys([6])
    lie = replace(
        request.sent[0], keys={"row": only}, update={"w": np.full((1, 3), 1e6, np.float32)}
    )
    others = [
        replace(one, keys={"row": word.keys([0])}, update={"w": np.ones((1, 3), np.float32)})
        for one in request.sent[1:]
    ]
    request = replace(request, results=[lie, *others])
    left_out = dense(request.layout, MEDIAN.add(request).rows)[0]
    zeros = dense(request.layout, TrimmedMean(0.5, "zeros").add(request).rows)[0]
    np.testing.assert_allclose(left_out[6], 1e6 / 5)
    np.testing.assert_allclose(zeros[6], 0)
    np.testing.assert_allclose(left_out[0], 4 / 5)


def test_neither_order_nor_pieces_show_in_the_bytes(monkeypatch):
    request = request_of("two key spaces", 1, "cohort", SENT)
    other = replace(request, results=request.results[::-1])
    whole = TrimmedMean(0.2).add(request).rows
    monkeypatch.setattr(robust, "_PIECE", 8)
    for rows in (TrimmedMean(0.2).add(other).rows, TrimmedMean(0.2).add(request).rows):
        for one, same in zip(rows, whole, strict=True):
            assert one.rows.tobytes() == same.rows.tobytes()


def test_nobody_is_no_sum():
    assert MEDIAN.add(request_of("rows", 0, "cohort", ("late", "refused"))).rows is None


@pytest.mark.parametrize("name", aggregation_names(lambda about: about.is_robust))
def test_robust_sums_declare_themselves(name):
    one = aggregation_named(name)
    assert one.about.name == name
    assert one.about.is_in_clear
    assert one.about.is_served
    assert not one.about.adds_in_blocks
    assert one.with_ring(None) is one
    load = Workload(num_keys=1000, keys_per_client=10, slice_bytes=100, cohort=5)
    plain, price = PLAIN.price(load), one.price(load)
    assert (price.name, price.bytes_up) == (name, plain.bytes_up)
    assert price.seconds_by["trainer"] > plain.seconds_by["trainer"]
    assert price.server_memory >= 5 * plain.bytes_up


@pytest.mark.parametrize("name", aggregation_names(lambda about: about.is_robust))
def test_no_privacy_is_promised_of_a_robust_sum(name):
    """One client more can move a trimmed mean further than its clip over the cohort."""
    pytest.importorskip("dp_accounting")
    parts = toy.make_plan(aggregate=aggregation_named(name), privacy=Privacy(1.0, 1.0))
    with pytest.raises(InputError, match="what a privacy account needs"):
        start_run(toy.make_state(), toy.make_clients(), parts)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: TrimmedMean(0.6), "is invalid"),
        (lambda: TrimmedMean(-0.1), "is invalid"),
        (lambda: TrimmedMean(0.1, "ones"), "is invalid"),
        (lambda: aggregation_named("median", trim=0.3), "leaves no value out"),
        (lambda: aggregation_named("plain", untouched="zeros"), "leaves no value out"),
        (lambda: NormAlarm(aggregation_named("secure-sparse")), "cannot ring"),
        (lambda: NormAlarm(PLAIN, 0.5), "cannot ring"),
    ],
)
def test_what_cannot_be_is_refused(make, match):
    with pytest.raises(InputError, match=match):
        make()


def test_zeros_and_a_mean_over_choosers_contradict_each_other():
    with pytest.raises(InputError, match="cannot both count and not count"):
        TrimmedMean(0.2, "zeros").add(request_of("rows", 0, "choosers", SENT))


def test_sums_of_blocks_cannot_be_trimmed():
    request = replace(request_of("rows", 0, "cohort", SENT), blocks=())
    with pytest.raises(InputError, match="added up before they were sorted"):
        MEDIAN.add(request)


@pytest.mark.parametrize("way", [TrimmedMean(0.2), MEDIAN, TrimmedMean(0.2, "zeros")])
def test_it_trains_alike_wherever_clients_train(way):
    here, there = (run_crowd(e, aggregate=way) for e in (in_process, Blocks()))
    assert here[0].tobytes() == there[0].tobytes()
    assert here[1] == there[1]
    assert here[1][0].seen_in_sum == way.about.seen_by()
    plain, _ = run_crowd()
    assert plain.tobytes() != here[0].tobytes()


def test_asynchronous_rounds_take_a_robust_sum():
    stream = {"buffering": Buffering(40, 20), "rounds": 3}
    model, records = run_crowd(boosting, aggregate=MEDIAN, max_update_norm=0.5, **stream)
    plain, _ = run_crowd(boosting, max_update_norm=0.5, **stream)
    assert model.tobytes() != plain.tobytes()
    assert records[0].seen_in_sum == MEDIAN.about.seen_by()


@pytest.mark.parametrize("inner", [PLAIN, MEDIAN])
@pytest.mark.parametrize("execute", [in_process, Blocks()])
def test_an_alarm_changes_nothing_but_what_is_told(inner, execute, caplog):
    quiet, before = run_crowd(execute, aggregate=inner)
    with caplog.at_level(logging.WARNING, "keyhole.aggregation"):
        model, records = run_crowd(execute, aggregate=NormAlarm(inner, 1.01))
    assert model.tobytes() == quiet.tobytes()
    assert sum(record.outliers for record in records) > 0
    assert [replace(record, outliers=0) for record in records] == before
    told = [entry.getMessage() for entry in caplog.records]
    assert told[0] == (
        f"round 0: {records[0].outliers} of {len(records[0].staleness)} updates are longer than "
        "1.01 times the median norm"
    )


def test_an_alarm_counts_by_the_median_norm():
    """Lengths 1 to 9 have the median 5: above 1.5 times that are 8 and 9."""
    request = request_of("rows", 0, "cohort", ("sent",) * 9)
    sized = [replace(one, norm=float(1 + i)) for i, one in enumerate(request.sent)]
    assert NormAlarm(PLAIN, 1.5).add(replace(request, results=sized)).outliers == 2
    assert NormAlarm(PLAIN, 1.5).add(request).outliers == 0, "nobody measured"
    assert about_of(NormAlarm(MEDIAN)).name == MEDIAN.about.name


def test_liars_ring_the_alarm():
    _, records = run_crowd(boosting, rounds=1, aggregate=NormAlarm(TrimmedMean(), 10.0))
    assert records[0].outliers == len([c for c in records[0].clients if c % 13 == 0])
