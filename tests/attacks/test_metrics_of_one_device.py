"""Attack: one device reports metrics that nobody else does, and they become those of the cohort.

Devices choose names and numbers of metrics. Names end up on screens, in records and in the files of
trackers; numbers near the largest make a mean that JSON cannot hold. The planted hole counts the
devices that report, and not those that are silent.
"""

import json
from dataclasses import replace

import numpy as np
import pytest

import keyhole as kh
from keyhole.aggregation.base import ClientResult
from keyhole.errors import InputError, RequestError
from keyhole.primitives.report import Report, summarize
from keyhole.rounds import adding
from keyhole.rounds.adding import agreed
from keyhole.rounds.record import RoundRecord, decode_records, encode_records
from keyhole.server.inputs import UNBOUND
from keyhole.wire.messages import encode_report, split_report
from tests.rounds.test_reports import reporting, run

EVIL = {"loss": 1e308, "x": 2.0}
BAD_NAMES = [
    "",
    "a b",
    "../../etc/passwd",
    "/a",
    "a/",
    "a//b",
    "a/.b",
    ".a",
    "-a",
    "a\n",
    "\x1b[2J",
]
BAD_NAMES += ["é", "a" * 65, "a\\b", "<b>", "a\x00"]
GOOD_NAMES = ["loss", "train/loss", "top-5", "a.b_c", "a" * 64, "9"]


def cohort(*reports):
    made = (ClientResult(c, "sent", {}, None, report=told) for c, told in enumerate(reports))
    return list(made)


def recorded(results):
    """The metrics of a round of devices, as their summary has them."""
    told = [one.report or Report(None) for one in agreed(results) if one.outcome == "sent"]
    return summarize(told, False).metrics


@pytest.mark.parametrize("honest", [None, Report(None), Report(None, 0.5)])
def test_metrics_of_one_device_are_not_those_of_a_silent_cohort(honest):
    results = cohort(*[honest] * 4, Report(None, None, EVIL), *[honest] * 4)
    assert recorded(results) == {}
    assert recorded(cohort(honest, Report(None, None, EVIL))) == {}, "silence wins a tie"


def test_one_silent_device_does_not_hide_the_metrics_of_the_others():
    honest = Report(None, None, {"loss": 1.0})
    found = recorded(cohort(honest, None, honest, Report(None, None, EVIL)))
    assert list(found) == ["loss"]
    assert found["loss"].mean == 1.0
    late = [replace(one, outcome="late") for one in cohort(*[Report(None, None, EVIL)] * 3)]
    assert list(recorded([*late, *cohort(honest)])) == ["loss"], "who is late has no say"


def test_where_the_silent_are_not_counted_the_attack_succeeds(monkeypatch):
    class OfReporters(adding.Counter):
        def __init__(self, names=()):
            super().__init__(each for each in names if each)

    monkeypatch.setattr(adding, "Counter", OfReporters)
    assert list(recorded(cohort(None, None, Report(None, None, EVIL), None))) == ["loss", "x"]


def test_a_mean_that_is_not_finite_is_null_in_the_record():
    huge = [Report(None, None, {"loss": value}) for value in (1e308, 1.7e308, -1.7e308, 1.7e308)]
    found = summarize(huge + huge[:2], False).metrics["loss"]
    record = RoundRecord(0, 1, [0], client_metrics={"loss": found})
    line = encode_records([record])

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    assert json.loads(line, parse_constant=refuse)["client_metrics"]["loss"]["mean"] is None
    (read,) = decode_records(line)
    assert np.isnan(read.client_metrics["loss"].mean)
    assert encode_records([read]) == line


@pytest.mark.parametrize("name", BAD_NAMES)
def test_a_name_that_is_not_allowed_is_refused_on_the_wire_and_in_process(name):
    with pytest.raises(RequestError, match="the name of a metric") as refused:
        split_report(encode_report(kh.Report(None, metrics={name: 1.0})), UNBOUND)
    assert refused.value.http_status == 400
    with pytest.raises(InputError, match=r"a metric of client \d+ in round 0 has an invalid name"):
        run(reporting(metrics=lambda *_: {name: 1.0}))


@pytest.mark.parametrize("name", GOOD_NAMES)
def test_usual_names_are_taken(name):
    told, _ = split_report(encode_report(kh.Report(None, metrics={name: 1.0})), UNBOUND)
    assert told.checked("client 1", 0).metrics == {name: 1.0}
