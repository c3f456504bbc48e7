"""Attack: a device says that its update has no weight, and sends it as long as the bound allows.

Where means are weighted by examples, honest devices send their update times its weight, a share of
the max weight, and the sum is divided by the sum of weights. The liar's update of norm C and weight
0 would move the mean by C over the weights of the others alone: further than C where these are
small. The planted hole is a service and a trainer that measure against C, whatever the weight.
"""

from math import inf

import numpy as np
import pytest

from keyhole.errors import InputError, RequestError, TooLargeError
from keyhole.primitives import report
from keyhole.primitives.report import LARGEST_WEIGHT, Report, summarize
from keyhole.server.inputs import InputBound, norm
from keyhole.wire import messages
from keyhole.wire.messages import encode_report, split_report
from tests.attacks.test_boosted_update import LIMIT, attack

MAX_WEIGHT = 1000.0
ROWS = {"w": np.array([3.0, 4.0], np.float32)}


def lie(directory, above, weight):
    """Trains one round with a device that sends C, and says that its update has this weight."""

    def send(device, told, report, keys):
        longest = np.zeros_like(report.update["x"])
        longest[0] = LIMIT
        return device.send(told, Report({"x": longest}, weight), keys)

    return attack(directory, send, above, over="examples", max_weight=MAX_WEIGHT)


@pytest.mark.parametrize("above", ["refuse", "clip"])
@pytest.mark.parametrize("weight", [0.0, 0.01])
def test_a_lying_weight_moves_the_mean_no_further_than_c(tmp_path, above, weight):
    length, record = lie(tmp_path, above, weight)
    assert length <= LIMIT * 1.001, "the weighted mean of updates of at most C"
    assert record.above_norm == 1
    assert len(record.refused) == (above == "refuse")


def test_without_weights_in_the_bound_the_attack_succeeds(tmp_path, monkeypatch):
    monkeypatch.setattr(InputBound, "limit", lambda self, weight=None: self.max_norm)
    length, record = lie(tmp_path, "refuse", 0.0)
    assert length > 10 * LIMIT
    assert record.above_norm == 0


@pytest.mark.parametrize("weight", [0.0, 1.0, 30.0, 33.0, 1000.0, 5000.0])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_what_an_honest_device_sends_is_within_the_bound_of_its_weight(weight, dtype):
    bound = InputBound(LIMIT, max_weight=MAX_WEIGHT)
    sent = bound.ready(Report({"w": ROWS["w"].astype(dtype)}, weight), {}, "client 1")
    share = min(weight, MAX_WEIGHT) / MAX_WEIGHT
    assert norm(sent.update) == pytest.approx(LIMIT * share, rel=1e-2)
    assert not bound.take(sent.update, {}, sent.weight).is_above


@pytest.mark.parametrize("share", [0.0, 1e-300, 0.03, 1.0])
def test_an_update_above_the_bound_of_its_weight_is_clipped_to_it(share):
    taken = InputBound(LIMIT, "clip", max_weight=MAX_WEIGHT).take(ROWS, {}, share)
    assert taken.is_above
    assert norm(taken.update) <= LIMIT * share
    refusing = InputBound(LIMIT, max_weight=MAX_WEIGHT)
    assert refusing.take(ROWS, {}, share).update is None
    assert isinstance(refusing.refusal(taken), TooLargeError)
    assert "0.5 times its weight" in str(refusing.refusal(taken))


def test_a_weight_changes_nothing_where_there_is_no_bound():
    for bound in (InputBound(max_weight=inf), InputBound(max_weight=8.0)):
        assert norm(bound.take(ROWS, {}, 0.0).update) == 5.0
    assert InputBound(LIMIT).limit(0.0) == LIMIT, "a round that does not weigh"


@pytest.mark.parametrize("weight", [1e308, 2e19, inf])
def test_weights_whose_sum_would_be_no_number_are_refused(weight):
    """Two of 1e308 make every other update nothing, and the record of the round no JSON."""
    bound = InputBound(max_weight=inf)
    body = encode_report(Report(None, weight))
    with pytest.raises(RequestError, match="its weight"):
        split_report(body, bound)
    with pytest.raises(InputError, match="is no weight"):
        Report(None, weight).checked("client 1", 0)
    assert (
        split_report(encode_report(Report(None, LARGEST_WEIGHT)), bound)[0].weight == LARGEST_WEIGHT
    )


def test_without_a_largest_weight_a_record_is_no_json(monkeypatch):
    for module in (messages, report):
        monkeypatch.setattr(module, "LARGEST_WEIGHT", inf)
    sent = [split_report(encode_report(Report(None, 1e308)), InputBound(max_weight=inf))[0]] * 2
    assert summarize(sent, True).weight == inf
