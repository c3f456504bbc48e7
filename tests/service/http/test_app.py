"""What the service gives out: every route that reads, and what caches are told."""

import numpy as np
import pytest

from keyhole.crypto.merkle import hash_leaves, prove
from keyhole.wire import messages as wire
from keyhole.wire.manifest import check_records, count_nodes
from tests.service.in_process import (
    EVERYONE_TABLE,
    IMMUTABLE,
    WORD_TABLE,
    Service,
)
from tests.service.memory_rounds import CUT, WORDS


@pytest.fixture
def service():
    return Service()


def test_the_current_round_is_told_and_not_cached(service):
    answer = service.ask("GET", "/v1/rounds/current")
    assert answer.json() == {
        "round": service.round.id,
        "number": 3,
        "phase": "open",
        "trailing": [],
    }
    assert answer.headers["cache-control"] == "no-store"


def test_before_the_first_round_there_is_none_and_the_service_is_not_ready(service):
    service.rounds.now = None
    service.assert_refused(service.ask("GET", "/v1/rounds/current"), 404, "NotFoundError")
    answer = service.ask("GET", "/readyz")
    service.assert_refused(answer, 503, "BusyError")
    assert int(answer.headers["retry-after"]) >= 1
    assert service.ask("GET", "/healthz").json() == {"alive": True}


def test_a_service_with_a_round_is_ready(service):
    assert service.ask("GET", "/readyz").json() == {"round": service.round.id}


def test_the_manifest_is_the_published_bytes(service):
    answer = service.ask("GET", "/v1/rounds/{id}/manifest")
    assert answer.content == service.round.encoded
    assert answer.headers["cache-control"] == IMMUTABLE


@pytest.mark.parametrize("method", ["POST", "QUERY"])
def test_slices_come_in_the_order_asked_with_repeats(service, method):
    keys = np.array([7, 3, 7, 0, WORDS - 1])
    table = service.round.tables[WORD_TABLE]
    answer = service.query(wire.Ask(WORD_TABLE, keys), method=method)
    assert answer.status_code == 200
    proof = prove(table.tree, np.unique(keys))
    assert answer.content == proof.tobytes() + table.records[keys].tobytes()
    assert table.fetches == 1


def test_the_rest_of_a_cut_answer_comes_without_a_proof(service):
    keys = np.array([7, 3])
    answer = service.query(wire.Ask(WORD_TABLE, keys, wants_proof=False))
    assert answer.content == service.round.tables[WORD_TABLE].records[keys].tobytes()


def test_the_head_of_an_answer_is_short(service):
    answer = service.query(wire.Ask(WORD_TABLE, np.arange(WORDS)))
    head = "".join(f"{name}: {value}\r\n" for name, value in answer.headers.items())
    assert len("HTTP/1.1 200 OK\r\n" + head + "\r\n") < 190


def test_several_tables_and_names_answer_in_one_body(service):
    words, everyone = service.round.tables[WORD_TABLE], service.round.tables[EVERYONE_TABLE]
    keys = np.array([4, 9, 4])
    held = wire.names_of(words.tree.nodes[keys])
    held[1] += np.uint64(1)
    asks = [
        wire.Ask(EVERYONE_TABLE, np.array([0])),
        wire.Ask(WORD_TABLE, keys, held),
        wire.Ask(WORD_TABLE, np.array([1])),
    ]
    answer = service.query(*asks)
    record_bytes = [table.info.record_bytes for table in service.round.tables]
    nodes = [count_nodes(service.round.tables[ask.table].info, ask.keys) for ask in asks]
    first, second, third = wire.decode_answer(answer.content, asks, record_bytes, nodes)
    np.testing.assert_array_equal(first.records, everyone.records)
    assert second.is_sent.tolist() == [False, True, False]
    np.testing.assert_array_equal(second.records, words.records[[9]])
    np.testing.assert_array_equal(third.records, words.records[[1]])
    np.testing.assert_array_equal(second.proof, prove(words.tree, np.array([4, 9])))
    np.testing.assert_array_equal(third.proof, prove(words.tree, np.array([1])))


@pytest.mark.parametrize("asks", [[], [wire.Ask(1, np.arange(0))]], ids=["no table", "no key"])
def test_nothing_asked_is_nothing_answered(service, asks):
    answer = service.query(*asks)
    assert (answer.status_code, answer.content) == (200, b"")
    assert answer.headers["content-length"] == "0"


def test_one_slice_has_a_url_of_its_own(service):
    table = service.round.tables[WORD_TABLE]
    answer = service.ask("GET", "/v1/rounds/{id}/tables/1/slices/7")
    proof = prove(table.tree, np.array([7]))
    assert answer.content == proof.tobytes() + table.records[7].tobytes()
    assert answer.headers["cache-control"] == IMMUTABLE
    assert answer.headers["etag"] == f'"{service.round.id}.1.7"'


def test_segments_are_the_files_and_their_proofs_lead_to_the_root(service):
    table = service.round.tables[WORD_TABLE]
    for place, rows in enumerate([slice(0, CUT), slice(CUT, WORDS)]):
        path = f"/v1/rounds/{{id}}/tables/1/segments/{place}"
        assert service.ask("GET", path).content == table.records[rows].tobytes()
        proof = np.frombuffer(service.ask("GET", f"{path}/proof").content, np.uint8)
        keys = np.arange(WORDS)[rows]
        check_records(table.info, keys, hash_leaves(table.records[rows]), proof.reshape(-1, 32))
    assert service.rounds.held == 0


def test_the_broadcast_part_is_what_everyone_receives(service):
    table = service.round.tables[EVERYONE_TABLE]
    answer = service.ask("GET", "/v1/rounds/{id}/broadcast")
    assert answer.content == table.records.tobytes()


FILES = [
    "/v1/rounds/{id}/manifest",
    "/v1/rounds/{id}/tables/1/slices/7",
    "/v1/rounds/{id}/tables/1/segments/1",
    "/v1/rounds/{id}/tables/1/segments/1/proof",
    "/v1/rounds/{id}/broadcast",
]


@pytest.mark.parametrize("path", FILES)
def test_who_has_it_already_is_told_so(service, path):
    whole = service.ask("GET", path)
    etag = whole.headers["etag"]
    for given in (etag, f"W/{etag}", f'"other", {etag}', "*"):
        answer = service.ask("GET", path, headers={"if-none-match": given})
        assert (answer.status_code, answer.content) == (304, b"")
        assert answer.headers["etag"] == etag
        assert "content-length" not in answer.headers
    for given in ('"other"', etag.strip('"'), ""):
        answer = service.ask("GET", path, headers={"if-none-match": given})
        assert (answer.status_code, answer.content) == (200, whole.content)
    assert service.rounds.held == 0


@pytest.mark.parametrize("path", FILES)
def test_head_gives_the_headers_of_get(service, path):
    whole, head = service.ask("GET", path), service.ask("HEAD", path)
    assert (head.status_code, head.content, head.headers) == (200, b"", whole.headers)
    assert service.rounds.held == 0


@pytest.mark.parametrize("path", FILES[2:])
@pytest.mark.parametrize(
    ("given", "start", "stop"),
    [
        ("bytes=0-0", 0, 1),
        ("bytes=3-9", 3, 10),
        ("bytes=5-", 5, None),
        ("bytes=-4", -4, None),
        ("bytes=2-999999", 2, None),
        ("bytes=-999999", 0, None),
    ],
)
def test_a_range_is_that_part(service, path, given, start, stop):
    whole = service.ask("GET", path)
    answer = service.ask("GET", path, headers={"range": given})
    part = whole.content[start:stop]
    first = len(whole.content) + start if start < 0 else start
    assert (answer.status_code, answer.content) == (206, part)
    expected = f"bytes {first}-{first + len(part) - 1}/{len(whole.content)}"
    assert answer.headers["content-range"] == expected
    assert answer.headers["content-length"] == str(len(part))


@pytest.mark.parametrize(
    "given", ["bytes=0-1,4-5", "bytes=5-2", "lines=1-2", "bytes=-", "bytes=x-", "", "bytes=+1-2"]
)
def test_a_range_that_cannot_be_read_is_the_whole(service, given):
    answer = service.ask("GET", FILES[2], headers={"range": given})
    assert (answer.status_code, len(answer.content)) == (200, 12 * (WORDS - CUT))


@pytest.mark.parametrize("given", ["bytes=180-", "bytes=9999999999999999999-", "bytes=-0"])
def test_a_range_behind_the_end_is_refused(service, given):
    answer = service.ask("GET", FILES[2], headers={"range": given})
    service.assert_refused(answer, 416, "RangeError")
    assert answer.headers["content-range"] == "bytes */180"


def test_a_range_of_something_older_is_the_whole(service):
    etag = service.ask("GET", FILES[2]).headers["etag"]
    for condition, status in ((etag, 206), ('"other"', 200), (f"W/{etag}", 200)):
        headers = {"range": "bytes=0-3", "if-range": condition}
        assert service.ask("GET", FILES[2], headers=headers).status_code == status
