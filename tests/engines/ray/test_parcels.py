"""Parcels: what comes out is what went in, and what clients have in common goes in once."""

import pickle
from itertools import pairwise

import numpy as np
import pytest

import keyhole as kh
from keyhole.engines.ray import parcels
from keyhole.engines.ray.parcels import KeyBundle, packing_of
from keyhole.keys.choice import ClientContext
from keyhole.rounds.clients import ClientJob, Jobs
from tests.engines import wide
from tests.rounds import toy


def job(client, **leaves):
    return ClientJob.of(0, 0, 0, client, {"feature": toy.FEATURE.keys([client])}, leaves)


def as_bytes(jobs):
    return [{name: leaf.tobytes() for name, leaf in j.submodel.items()} for j in jobs]


def send(jobs, *cuts):
    """The jobs after their way through pickle, in as many parcels as there are cuts and one."""
    packing = packing_of(jobs)
    common = pickle.loads(pickle.dumps(packing.common, protocol=5))
    bounds = [0, *cuts, len(jobs)]
    parcels = [packing.pack(range(*pair)) for pair in pairwise(bounds)]
    sent = [pickle.dumps(parcel, protocol=5) for parcel in parcels]
    found = [j for parcel in sent for j in pickle.loads(parcel).jobs(common)]
    assert [(j.client, j.seed_path) for j in found] == [(j.client, j.seed_path) for j in jobs]
    assert [as_list(j.keys) for j in found] == [as_list(j.keys) for j in jobs]
    return found, sum(map(len, sent))


def as_list(keys):
    return [list(z) for z in keys] if isinstance(keys, list) else list(keys)


WHOLE = np.arange(50_000, dtype=np.float32)


def test_what_everybody_receives_is_packed_once():
    jobs = [job(c, own=np.full(c + 1, c, np.float32), whole=WHOLE.copy()) for c in range(20)]
    found, size = send(jobs, 7)
    assert size < WHOLE.nbytes
    assert as_bytes(found) == as_bytes(jobs)


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
    assert as_bytes(send(jobs)[0]) == as_bytes(jobs)


def test_a_later_client_that_received_something_else_keeps_it():
    jobs = [job(c, x=WHOLE) for c in range(2)] + [job(2, x=WHOLE[::-1]), job(3, y=WHOLE)]
    assert as_bytes(send(jobs)[0]) == as_bytes(jobs)


def test_nan_is_the_same_as_itself():
    jobs = [job(c, x=np.full(9_000, np.nan, np.float32)) for c in range(9)]
    found, size = send(jobs)
    assert as_bytes(found) == as_bytes(jobs)
    assert size < jobs[0].submodel["x"].nbytes


def test_few_clients_are_sent_as_they_are():
    assert as_bytes(send([job(0, x=WHOLE)])[0]) == [{"x": WHOLE.tobytes()}]
    assert send([])[0] == []


@pytest.mark.parametrize("turn", [np.asarray, np.transpose], ids=["rows first", "columns first"])
def test_leaves_travel_without_gaps_and_with_their_axes_in_order(turn):
    """A product of them then takes the same path through BLAS, and has the same bytes."""
    gaps = turn(np.arange(600, dtype=np.float32).reshape(20, 30)[:, :28])
    (found,), _ = send([job(0, x=gaps)])
    sent = found.submodel["x"]
    assert sent.tobytes() == gaps.tobytes()
    assert np.argsort(sent.strides).tolist() == np.argsort(gaps.strides).tolist()


def selected_jobs(count):
    """Jobs of clients with 40 of 120 rows each, as a plain delivery makes them."""
    state, rng = wide.make_state(), np.random.default_rng(5)
    keys = {client: wide.choose(client, ClientContext({"row": 40}, rng)) for client in range(count)}
    return Jobs((1, 2, 3), keys, lambda client: state.select(keys[client]), state)


@pytest.fixture(params=["small", "large"])
def kind_of_model(request, monkeypatch):
    monkeypatch.setattr(parcels, "_WHOLE", {"small": 1 << 20, "large": 0}[request.param])
    return request.param


def test_rows_travel_once_and_sub_models_are_the_servers(kind_of_model):
    jobs = selected_jobs(30)
    found, size = send(jobs)
    assert as_bytes(found) == as_bytes(jobs)
    rows = {"small": 0, "large": wide.MODEL["x"].nbytes}[kind_of_model]
    assert size < rows + 20_000, "the rows of 30 clients are ten times as many"
    for mine, theirs in zip(jobs, found, strict=True):
        for name, leaf in mine.submodel.items():
            assert theirs.submodel[name].strides == leaf.strides
            assert theirs.submodel[name].flags.writeable


def test_a_parcel_of_a_large_model_has_the_rows_of_its_clients_alone(monkeypatch):
    monkeypatch.setattr(parcels, "_WHOLE", 0)
    _, size = send(selected_jobs(3), 1, 2)
    rows = 3 * 40 * 500 * 4
    assert rows < size < 1.1 * rows


WORD, ROW = kh.KeySpace("word", 2**63), kh.KeySpace("row", 9)


@pytest.mark.parametrize(
    "keys",
    [
        [],
        [{"word": WORD.keys([2**63 - 1, 0, 0])}],
        [{"word": WORD.keys([])}, {"word": WORD.keys([5])}],
        [{"word": WORD.keys([1]), "row": ROW.keys([8, 2])}, {"row": ROW.keys([])}],
    ],
    ids=["nobody", "one", "none chosen", "two spaces"],
)
def test_a_bundle_holds_keys_as_clients_gave_them(keys):
    bundle = pickle.loads(pickle.dumps(KeyBundle.of(keys), protocol=5))
    found = bundle.unpack()
    assert found == keys
    assert [list(own) for own in found] == [list(own) for own in keys]
