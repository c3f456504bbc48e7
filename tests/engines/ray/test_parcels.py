"""Parcels: what comes out is what went in, and what everybody has goes in once."""

import pickle

import numpy as np
import pytest

from keyhole.engines.ray.parcels import common_leaves, pack, unpack
from keyhole.training.jobs import Job
from tests.training import toy


def job(client, **leaves):
    return Job.of(0, 0, 0, client, toy.FEATURE.keys([client]), leaves)


def as_bytes(jobs):
    return [{name: leaf.tobytes() for name, leaf in j.submodel.items()} for j in jobs]


WHOLE = np.arange(50_000, dtype=np.float32)


def test_what_everybody_receives_is_packed_once():
    jobs = [job(c, own=np.full(c + 1, c, np.float32), whole=WHOLE.copy()) for c in range(20)]
    common = common_leaves(jobs)
    assert common.keys() == {"whole"}
    packed = pack(jobs, common)
    assert len(pickle.dumps(packed)) < WHOLE.nbytes
    assert as_bytes(unpack(packed, common)) == as_bytes(jobs)
    assert [j.keys for j in unpack(packed, common)] == [j.keys for j in jobs]


@pytest.mark.parametrize(
    "other",
    [
        WHOLE[:-1],
        WHOLE.astype(np.float64),
        np.append(WHOLE[:-1], np.float32(0)),
        np.append(np.float32(-0.0), WHOLE[1:]),  # equal to zero, and other bytes
    ],
)
def test_what_differs_by_a_bit_is_not_common(other):
    jobs = [job(0, x=WHOLE), job(1, x=other)]
    assert common_leaves(jobs) == {}
    assert as_bytes(unpack(pack(jobs, {}), {})) == as_bytes(jobs)


def test_a_later_client_that_received_something_else_keeps_it():
    jobs = [job(c, x=WHOLE) for c in range(2)] + [job(2, x=WHOLE[::-1]), job(3, y=WHOLE)]
    common = common_leaves(jobs)
    assert common.keys() == {"x"}
    assert as_bytes(unpack(pack(jobs, common), common)) == as_bytes(jobs)


def test_nan_is_the_same_as_itself():
    jobs = [job(c, x=np.full(3, np.nan, np.float32)) for c in range(2)]
    assert common_leaves(jobs).keys() == {"x"}


def test_a_client_alone_has_nothing_in_common():
    assert common_leaves([job(0, x=WHOLE)]) == {}
    assert common_leaves([]) == {}


@pytest.mark.parametrize("turn", [np.asarray, np.transpose], ids=["rows first", "columns first"])
def test_leaves_travel_without_gaps_and_with_their_axes_in_order(turn):
    """A product of them then takes the same path through BLAS, and has the same bytes."""
    gaps = turn(np.arange(600, dtype=np.float32).reshape(20, 30)[:, :28])
    (packed,) = pack([job(0, x=gaps)], {})
    sent = pickle.loads(pickle.dumps(packed.submodel["x"], protocol=5))
    assert sent.tobytes() == gaps.tobytes()
    assert np.argsort(sent.strides).tolist() == np.argsort(gaps.strides).tolist()
