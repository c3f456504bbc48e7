"""The service: every route, every refusal, and what caches are told. No socket is opened.

Renew the golden errors with KEYHOLE_RENEW_GOLDEN=1.
"""

import asyncio
import json
import logging
import os
import random
import re
from functools import partial

import httpx
import numpy as np
import pytest

from keyhole import errors
from keyhole.serving import wire
from keyhole.serving.access import Access, Keyring
from keyhole.serving.app import App
from keyhole.serving.coordinator import Pace, admit
from keyhole.serving.limits import Limits
from keyhole.serving.responses import error_response, json_response
from keyhole.serving.routes import Route
from keyhole.serving.tables import Current
from keyhole.serving.update_spool import UpdateSpool
from tests.helpers import ROOT
from tests.serving.memory_rounds import CUT, WORDS, MemoryRounds, layout

GOLDEN = ROOT / "tests" / "golden" / "serving" / "errors.json"
NOW = 1_800_000_000.0
RING = Keyring((b"k" * 32,))
BINARY = {"content-type": "application/octet-stream"}
IMMUTABLE = "public, max-age=31536000, immutable, no-transform"
SHAPE = {"status", "kind", "wrong", "got", "allowed", "fix"}
WORD_TABLE, EVERYONE_TABLE = 1, 0


class Service:
    """A service over rounds in memory, and a client of it."""

    def __init__(self, spool=None, cohort=None, **settings):
        self.rounds = MemoryRounds()
        self.round = self.rounds.open(3, cohort)
        self.spool = spool
        settings.setdefault("access", Access(RING))
        self.app = App(
            self.rounds,
            spool=spool,
            admit=partial(admit, pace=Pace(spread=4.0), uniform=lambda: 0.5),
            clock=lambda: NOW,
            rng=random.Random(0),
            **settings,
        )

    def ask(self, method, path, **request):
        """One request; `{id}` in the path is the round."""

        async def run():
            transport = httpx.ASGITransport(self.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
                return await client.request(method, path.format(id=self.round.id), **request)

        return asyncio.run(run())

    def query(self, *asks, method="POST", **headers):
        body = wire.encode_query(asks)
        path = "/v1/rounds/{id}/slices"
        return self.ask(method, path, content=body, headers={**BINARY, **headers})

    def refused(self, answer, status, kind):
        """Demands an error of the one shape; nothing stays held behind it."""
        assert answer.status_code == status, answer.text
        facts = answer.json()["error"]
        assert facts.keys() == SHAPE
        assert (facts["status"], facts["kind"]) == (status, kind)
        assert answer.headers["content-type"] == "application/json"
        assert answer.headers["cache-control"] == "no-store"
        assert self.rounds.held == 0
        return facts


@pytest.fixture
def service():
    return Service()


@pytest.fixture
def taking(tmp_path):
    """A service that takes updates."""
    return Service(spool=UpdateSpool(tmp_path / "updates"))


def device_token(**changes):
    return RING.issue("device", "phone-1", **{"now": NOW, "seconds": 60.0, **changes})


def round_token(service, **changes):
    known = {"now": NOW, "seconds": 60.0, "round_id": service.round.id, "device": "phone-1"}
    return RING.issue("round", **{**known, **changes})


def bearer(token):
    return {"authorization": f"Bearer {token}"}


def update_of(value=1.0, keys=(3, 5)):
    made = layout()
    z = {"word": made.spaces[0].keys(keys)}
    update = {"w": np.full((len(keys), 3), value, np.float32), "b": np.zeros(5, np.float32)}
    return wire.encode_update(made, update, z)


def send_update(service, body=None, token=None, **headers):
    token = round_token(service) if token is None else token
    return service.ask(
        "POST",
        "/v1/rounds/{id}/updates",
        content=update_of() if body is None else body,
        headers={**BINARY, **bearer(token), **headers},
    )


# Reading


def test_the_current_round_is_told_and_not_cached(service):
    answer = service.ask("GET", "/v1/rounds/current")
    assert answer.json() == {"round": service.round.id, "number": 3, "phase": "open"}
    assert answer.headers["cache-control"] == "no-store"


def test_before_the_first_round_there_is_none_and_the_service_is_not_ready(service):
    service.rounds.now = None
    service.refused(service.ask("GET", "/v1/rounds/current"), 404, "NotFoundError")
    answer = service.ask("GET", "/readyz")
    service.refused(answer, 503, "BusyError")
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
    assert answer.content == table.records[keys].tobytes()
    assert answer.headers["keyhole-check"] == wire.check_of([table.sums[keys]])
    assert table.fetches == 1


def test_the_head_of_an_answer_is_short(service):
    answer = service.query(wire.Ask(WORD_TABLE, np.arange(WORDS)))
    head = "".join(f"{name}: {value}\r\n" for name, value in answer.headers.items())
    assert len("HTTP/1.1 200 OK\r\n" + head + "\r\n") < 190


def test_several_tables_and_sums_answer_in_one_body(service):
    words, everyone = service.round.tables[WORD_TABLE], service.round.tables[EVERYONE_TABLE]
    keys = np.array([4, 9, 4])
    held = words.sums[keys].copy()
    held[1] += np.uint64(1)
    asks = [
        wire.Ask(EVERYONE_TABLE, np.array([0])),
        wire.Ask(WORD_TABLE, keys, held),
        wire.Ask(WORD_TABLE, np.array([1])),
    ]
    answer = service.query(*asks)
    record_bytes = [table.info.record_bytes for table in service.round.tables]
    first, second, third = wire.decode_answer(answer.content, asks, record_bytes)
    np.testing.assert_array_equal(first.records, everyone.records)
    assert second.is_sent.tolist() == [False, True, False]
    np.testing.assert_array_equal(second.records, words.records[[9]])
    np.testing.assert_array_equal(third.records, words.records[[1]])
    sums = [everyone.sums, words.sums[keys], words.sums[[1]]]
    assert answer.headers["keyhole-check"] == wire.check_of(sums)


@pytest.mark.parametrize("asks", [[], [wire.Ask(1, np.arange(0))]], ids=["no table", "no key"])
def test_nothing_asked_is_nothing_answered(service, asks):
    answer = service.query(*asks)
    assert (answer.status_code, answer.content) == (200, b"")
    assert answer.headers["content-length"] == "0"


def test_one_slice_has_a_url_of_its_own(service):
    table = service.round.tables[WORD_TABLE]
    answer = service.ask("GET", "/v1/rounds/{id}/tables/1/slices/7")
    assert answer.content == table.records[7].tobytes()
    assert answer.headers["cache-control"] == IMMUTABLE
    assert answer.headers["keyhole-check"] == wire.check_of([table.sums[[7]]])
    assert answer.headers["etag"] == f'"{int(table.sums[7]):016x}"'


def test_segments_and_sums_are_the_files(service):
    table = service.round.tables[WORD_TABLE]
    for place, rows in enumerate([slice(0, CUT), slice(CUT, WORDS)]):
        path = f"/v1/rounds/{{id}}/tables/1/segments/{place}"
        assert service.ask("GET", path).content == table.records[rows].tobytes()
        assert service.ask("GET", f"{path}/sums").content == table.sums[rows].tobytes()
    assert service.rounds.held == 0


def test_the_broadcast_part_is_what_everyone_receives(service):
    table = service.round.tables[EVERYONE_TABLE]
    answer = service.ask("GET", "/v1/rounds/{id}/broadcast")
    assert answer.content == table.records.tobytes()
    assert answer.headers["keyhole-check"] == wire.check_of([table.sums])


FILES = [
    "/v1/rounds/{id}/manifest",
    "/v1/rounds/{id}/tables/1/slices/7",
    "/v1/rounds/{id}/tables/1/segments/1",
    "/v1/rounds/{id}/tables/1/segments/1/sums",
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
    service.refused(answer, 416, "RangeError")
    assert answer.headers["content-range"] == "bytes */180"


def test_a_range_of_something_older_is_the_whole(service):
    etag = service.ask("GET", FILES[2]).headers["etag"]
    for condition, status in ((etag, 206), ('"other"', 200), (f"W/{etag}", 200)):
        headers = {"range": "bytes=0-3", "if-range": condition}
        assert service.ask("GET", FILES[2], headers=headers).status_code == status


# Refusals


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/v1",
        "/v1/rounds",
        "/v1/rounds/",
        "/v1/rounds/{id}",
        "/v1/rounds/{id}/",
        "/v1/rounds/{id}/nope",
        "/v1/rounds/{id}/manifest/",
        "/v1//rounds/current",
        "/v1/rounds/%2e%2e/manifest",
        "/v1/rounds/{id}%2fmanifest",
        "/v1/rounds/x/manifest",
        "/v1/rounds/9-0123456789abcdef/manifest",
        "/v1/rounds/{id}/tables/2/slices/0",
        "/v1/rounds/{id}/tables/-1/slices/0",
        "/v1/rounds/{id}/tables/01/slices/0",
        "/v1/rounds/{id}/tables/1/slices/40",
        "/v1/rounds/{id}/tables/1/slices/-1",
        "/v1/rounds/{id}/tables/1/slices/1e1",
        "/v1/rounds/{id}/tables/1/slices/99999999999999999999",
        "/v1/rounds/{id}/tables/1/segments/2",
        "/v1/rounds/{id}/tables/1/segments/0/nope",
    ],
)
def test_what_does_not_exist_is_404(service, path):
    service.refused(service.ask("GET", path), 404, "NotFoundError")


def test_a_round_without_a_broadcast_part_says_so(service):
    only = type(service.round)(
        service.round.id, service.round.manifest, service.round.encoded, service.round.tables[1:]
    )
    service.rounds.rounds[only.id] = only
    service.refused(service.ask("GET", "/v1/rounds/{id}/broadcast"), 404, "NotFoundError")


def test_a_removed_round_is_410(service):
    service.rounds.removed.add(service.round.id)
    service.refused(service.ask("GET", "/v1/rounds/{id}/manifest"), 410, "TooLateError")
    service.refused(service.query(wire.Ask(1, np.array([1]))), 410, "TooLateError")


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("GET", "/v1/rounds/{id}/slices", "POST, QUERY"),
        ("DELETE", "/v1/rounds/{id}/manifest", "GET, HEAD"),
        ("GET", "/v1/checkin", "POST"),
        ("OPTIONS", "/healthz", "GET, HEAD"),
        ("PUT", "/v1/rounds/{id}/updates", "POST"),
    ],
)
def test_another_method_is_405_and_told_which_ones_there_are(service, method, path, allow):
    answer = service.ask(method, path)
    service.refused(answer, 405, "MethodError")
    assert answer.headers["allow"] == allow


def test_another_content_type_is_415(service):
    for kind in ({}, {"content-type": "text/plain"}):
        answer = service.ask("POST", "/v1/rounds/{id}/slices", content=b"x", headers=kind)
        service.refused(answer, 415, "MediaTypeError")


@pytest.mark.parametrize("body", [b"", b"KHQ1", b"x" * 8, b"KHQ1\x01\x00\x00\x00", b"KHU1" * 9])
def test_bytes_that_are_no_query_are_400(service, body):
    answer = service.ask("POST", "/v1/rounds/{id}/slices", content=body, headers=BINARY)
    service.refused(answer, 400, "RequestError")


@pytest.mark.parametrize("key", [-1, 77, 2**40, -(2**31)])
def test_keys_outside_are_counted_and_never_shown(service, key, caplog):
    answer = service.query(wire.Ask(WORD_TABLE, np.array([1, key, 2])))
    facts = service.refused(answer, 400, "KeySpaceError")
    assert facts["got"] == "1 of 3 keys"
    assert str(key) not in answer.text.replace("0..39", "")
    assert caplog.text == ""


def test_the_first_key_behind_the_end_is_refused(service):
    assert service.query(wire.Ask(WORD_TABLE, np.array([WORDS - 1]))).status_code == 200
    service.refused(service.query(wire.Ask(WORD_TABLE, np.array([WORDS]))), 400, "KeySpaceError")


def test_too_many_keys_are_413(service):
    limited = Service(limits=Limits(most_keys=2))
    assert limited.query(wire.Ask(1, np.arange(2))).status_code == 200
    limited.refused(limited.query(wire.Ask(1, np.arange(3))), 413, "TooLargeError")


def test_an_answer_beyond_the_limit_is_413_before_it_is_made(service):
    limited = Service(limits=Limits(most_answer=100))
    limited.refused(limited.query(wire.Ask(1, np.arange(20))), 413, "TooLargeError")
    assert limited.round.tables[WORD_TABLE].fetches == 0


def test_a_body_beyond_the_limit_is_413_by_its_head_and_by_its_length():
    service = Service(limits=Limits(most_keys=1))
    path, most = "/v1/rounds/{id}/slices", wire.most_query_bytes(1)
    longer = b"x" * (most + 1)
    service.refused(service.ask("POST", path, content=longer, headers=BINARY), 413, "TooLargeError")

    async def pieces():
        for _ in range(100):
            yield b"x" * (most // 2)

    service.refused(
        service.ask("POST", path, content=pieces(), headers=BINARY), 413, "TooLargeError"
    )


@pytest.mark.parametrize("length", ["-1", "x", "1e3", "9" * 30, "+5", "٣".encode()])
def test_a_content_length_that_is_no_number_is_400(service, length):
    headers = {**BINARY, "content-length": length}
    answer = service.ask("POST", "/v1/rounds/{id}/slices", content=b"x", headers=headers)
    service.refused(answer, 400, "RequestError")


def test_a_body_that_never_comes_is_408():
    service = Service(limits=Limits(body_seconds=0.05, slowest=1e9))

    async def stalled():
        yield b"KHQ1"
        await asyncio.sleep(60)

    answer = service.ask("POST", "/v1/rounds/{id}/slices", content=stalled(), headers=BINARY)
    service.refused(answer, 408, "SlowError")


def test_a_slow_body_has_more_time_the_more_of_it_has_come():
    service = Service(limits=Limits(body_seconds=0.05, slowest=100.0))
    body = wire.encode_query([wire.Ask(WORD_TABLE, np.arange(10))])

    async def steady():
        for at in range(0, len(body), 8):
            yield body[at : at + 8]
            await asyncio.sleep(0.02)

    answer = service.ask("POST", "/v1/rounds/{id}/slices", content=steady(), headers=BINARY)
    assert answer.status_code == 200


def test_a_device_that_asks_too_often_is_told_when_to_come_back(service):
    limited = Service(
        access=Access(RING, reads_need_token=True), limits=Limits(rate=0.1, burst=20.0)
    )
    headers = bearer(round_token(limited))
    answers = [limited.ask("GET", "/v1/rounds/{id}/manifest", headers=headers) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200, 200, 429]
    limited.refused(answers[2], 429, "TooManyError")
    assert 10 <= int(answers[2].headers["retry-after"]) <= 11
    other = bearer(round_token(limited, device="phone-2"))
    assert limited.ask("GET", "/v1/rounds/{id}/manifest", headers=other).status_code == 200


def test_a_full_service_is_503_and_spreads_those_who_come_back():
    service = Service(limits=Limits(in_flight=1, waiting=1))
    table, begun = service.round.tables[WORD_TABLE], None

    async def story():
        nonlocal begun
        begun, go = asyncio.Event(), asyncio.Event()
        fetch = table.fetch

        async def slow(keys):
            begun.set()
            await go.wait()
            return await fetch(keys)

        table.fetch = slow
        transport = httpx.ASGITransport(service.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            body = wire.encode_query([wire.Ask(WORD_TABLE, np.array([1]))])
            path = f"/v1/rounds/{service.round.id}/slices"
            post = partial(client.post, path, content=body, headers=BINARY)
            first = asyncio.create_task(post())
            await begun.wait()
            second = asyncio.create_task(post())
            while service.app.metrics.page().find(b"keyhole_requests_waiting 1.0") < 0:
                await asyncio.sleep(0)
            busy = [await post() for _ in range(8)]
            go.set()
            return [await first, await second], busy

    served, busy = asyncio.run(story())
    assert [answer.status_code for answer in served] == [200, 200]
    for answer in busy:
        service.refused(answer, 503, "BusyError")
    assert len({answer.headers["retry-after"] for answer in busy}) > 1
    assert b"keyhole_requests_waiting 0.0" in service.app.metrics.page()


# Access


def test_reads_with_tokens_are_for_the_round_and_kept_from_shared_caches():
    service = Service(access=Access(RING, reads_need_token=True))
    path = "/v1/rounds/{id}/manifest"
    answer = service.ask("GET", path, headers=bearer(round_token(service)))
    assert answer.headers["cache-control"].startswith("private, ")
    answer = service.ask("GET", path)
    service.refused(answer, 401, "AccessError")
    assert answer.headers["www-authenticate"] == "Bearer"
    old = round_token(service, now=NOW - 1000)
    service.refused(service.ask("GET", path, headers=bearer(old)), 401, "AccessError")
    other = round_token(service, round_id="9-0123456789abcdef")
    service.refused(service.ask("GET", path, headers=bearer(other)), 403, "NotAdmittedError")
    current = "/v1/rounds/current"
    service.refused(service.ask("GET", current), 401, "AccessError")
    assert service.ask("GET", current, headers=bearer(device_token())).status_code == 200


def test_open_reads_look_at_no_token(service):
    headers = {"authorization": "Bearer junk"}
    assert service.ask("GET", "/v1/rounds/{id}/manifest", headers=headers).status_code == 200


def test_a_token_may_allow_fewer_keys_than_the_service():
    service = Service(access=Access(RING, reads_need_token=True))
    headers = bearer(round_token(service, most_keys=2))
    assert service.query(wire.Ask(1, np.arange(2)), **headers).status_code == 200
    answer = service.query(wire.Ask(1, np.arange(3)), **headers)
    service.refused(answer, 403, "NotAdmittedError")


def test_a_device_checks_in_and_gets_a_token_of_the_round(taking):
    answer = taking.ask("POST", "/v1/checkin", headers=bearer(device_token(most_keys=9)))
    told = answer.json()
    assert (told["round"], told["number"], told["fetch_after"]) == (taking.round.id, 3, 2.0)
    claims = RING.verify(told["token"].encode(), NOW)
    assert (claims.kind, claims.device, claims.round) == ("round", "phone-1", taking.round.id)
    assert claims.most_keys == 9


def test_a_device_without_a_round_is_told_to_wait(taking):
    checkin = partial(taking.ask, "POST", "/v1/checkin", headers=bearer(device_token()))
    taking.rounds.now = Current(taking.round.id, 3, "closed")
    assert checkin().json() == {"wait": 5.0}
    taking.rounds.now = Current(taking.round.id, 3, "open", {"phone-2": 0})
    assert checkin().json() == {"wait": 5.0}
    taking.rounds.now = Current(taking.round.id, 3, "open", {"phone-1": 0})
    assert "token" in checkin().json()
    send_update(taking)
    assert checkin().json() == {"wait": 5.0}
    taking.rounds.now = None
    assert checkin().json() == {"wait": 5.0}


def test_checking_in_takes_a_device_token(taking):
    taking.refused(taking.ask("POST", "/v1/checkin"), 401, "AccessError")
    headers = bearer(round_token(taking))
    taking.refused(taking.ask("POST", "/v1/checkin", headers=headers), 403, "NotAdmittedError")


# Updates


def test_an_update_is_stored_once(taking):
    first, again = send_update(taking), send_update(taking)
    assert (first.status_code, first.json()) == (201, {"update": "stored"})
    assert (again.status_code, again.json()) == (200, {"update": "known"})
    assert taking.spool.read(taking.round.id, "phone-1") == update_of()
    taking.refused(send_update(taking, update_of(2.0)), 409, "ConflictError")
    assert taking.spool.read(taking.round.id, "phone-1") == update_of()


def test_an_update_needs_a_token_of_the_round(taking):
    taking.refused(send_update(taking, token=device_token()), 403, "NotAdmittedError")
    taking.refused(send_update(taking, token="kh1.x.y"), 401, "AccessError")
    foreign = Keyring((b"x" * 32,)).issue(
        "round", "phone-1", now=NOW, seconds=60.0, round_id=taking.round.id
    )
    taking.refused(send_update(taking, token=foreign), 401, "AccessError")


def test_an_update_of_a_closed_or_older_round_is_410(taking):
    taking.rounds.now = Current(taking.round.id, 3, "closed")
    taking.refused(send_update(taking), 410, "TooLateError")
    token, path = round_token(taking), f"/v1/rounds/{taking.round.id}/updates"
    taking.round = taking.rounds.open(4)
    answer = taking.ask("POST", path, content=update_of(), headers={**BINARY, **bearer(token)})
    taking.refused(answer, 410, "TooLateError")


def test_a_device_outside_the_cohort_is_403(tmp_path):
    service = Service(spool=UpdateSpool(tmp_path / "updates"), cohort={"phone-2": 0})
    service.refused(send_update(service), 403, "NotAdmittedError")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3e38, -(2.0**109)])
def test_an_update_that_cannot_be_added_up_is_refused(taking, value):
    taking.refused(send_update(taking, update_of(value)), 400, "NotFiniteError")
    assert taking.spool.devices(taking.round.id) == []


@pytest.mark.parametrize("change", [b"", b"x", update_of()[:-1], update_of() + b"\x00"])
def test_an_update_that_cannot_be_read_is_400(taking, change):
    taking.refused(send_update(taking, change), 400, "RequestError")


def test_an_update_with_a_flipped_bit_is_refused(taking):
    for place in range(len(update_of())):
        changed = bytearray(update_of())
        changed[place] ^= 4
        assert send_update(taking, bytes(changed)).status_code == 400
    assert taking.spool.devices(taking.round.id) == []


def test_an_update_beyond_the_limit_is_413(tmp_path):
    service = Service(spool=UpdateSpool(tmp_path / "u"), limits=Limits(most_body=50))
    service.refused(send_update(service), 413, "TooLargeError")


def test_a_disk_that_refuses_is_507(taking, tmp_path):
    (tmp_path / "updates").write_text("not a directory")
    taking.refused(send_update(taking), 507, "StorageError")


def test_a_service_without_a_spool_takes_no_updates(service):
    service.refused(send_update(service), 404, "NotFoundError")
    only_reads = Service(access=Access())
    only_reads.refused(only_reads.ask("POST", "/v1/checkin"), 404, "NotFoundError")


# The edge


def test_an_unexpected_error_is_500_without_a_word_about_it(service, caplog):
    async def broken(keys):
        raise RuntimeError(f"secret {keys}")

    service.round.tables[WORD_TABLE].fetch = broken
    answer = service.query(wire.Ask(WORD_TABLE, np.array([31])))
    service.refused(answer, 500, "KeyholeError")
    (record,) = caplog.records
    assert re.fullmatch(r"unexpected RuntimeError at test_app.py:\d+", record.getMessage())
    assert record.exc_info is None
    assert "secret" not in answer.text
    assert 'keyhole_refused_total{kind="Unexpected"} 1.0' in service.app.metrics.page().decode()
    assert b"keyhole_requests_in_flight 0.0" in service.app.metrics.page()


def test_further_routes_can_be_mounted():
    async def relay(request):
        return json_response({"said": request.params[0]}, 201)

    service = Service(extra_routes=[Route("relay", ("POST",), "/v1/relay/{word}", relay)])
    answer = service.ask("POST", "/v1/relay/hello")
    assert (answer.status_code, answer.json()) == (201, {"said": "hello"})
    service.refused(service.ask("GET", "/v1/relay/hello"), 405, "MethodError")
    page = service.app.metrics.page().decode()
    assert 'keyhole_requests_total{route="relay",status="201"} 1.0' in page


def test_a_client_that_leaves_is_counted_and_gets_nothing(service):
    async def story():
        sent = []

        async def receive():
            return {"type": "http.disconnect"}

        async def send(message):
            sent.append(message)

        headers = [(b"content-type", b"application/octet-stream")]
        path = f"/v1/rounds/{service.round.id}/slices"
        scope = {"type": "http", "method": "POST", "path": path, "headers": headers}
        await service.app(scope, receive, send)
        return sent

    assert asyncio.run(story()) == []
    assert b"keyhole_gone_total 1.0" in service.app.metrics.page()


def test_metrics_count_without_naming_anyone(taking):
    taking.query(wire.Ask(WORD_TABLE, np.array([3, 31])))
    taking.ask("GET", "/v1/rounds/{id}/tables/1/slices/31")
    send_update(taking)
    send_update(taking)
    send_update(taking, b"junk")
    page = taking.ask("GET", "/metrics").text
    lines = dict(line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))
    expected = {
        "keyhole_keys_total": 3,
        "keyhole_ideal_bytes_total": 36,
        "keyhole_updates_stored_total": 1,
        "keyhole_updates_repeated_total": 1,
        "keyhole_updates_refused_total": 1,
        'keyhole_refused_total{kind="RequestError"}': 1,
        'keyhole_requests_total{route="slices",status="200"}': 1,
        'keyhole_request_seconds_count{route="updates"}': 3,
    }
    assert {name: float(lines[name]) for name in expected} == expected
    assert float(lines["keyhole_sent_bytes_total"]) > 36
    assert "phone" not in page
    assert taking.round.id not in page
    labels = set(re.findall(r'(\w+)="', page))
    assert labels == {"route", "status", "kind", "le"}


def test_nothing_is_logged_about_what_was_asked(taking, caplog):
    with caplog.at_level(logging.DEBUG, logger="keyhole"):
        taking.query(wire.Ask(WORD_TABLE, np.array([31, 10**6])))
        send_update(taking)
        send_update(taking, b"junk")
    assert [r for r in caplog.records if r.name.startswith("keyhole")] == []


def test_every_kind_of_error_has_one_shape():
    shown = {}
    for name in errors.__all__:
        error = getattr(errors, name)("what is wrong", got="got", allowed="GET, POST", fix="fix")
        response = error_response(error, 1.2 if error.http_status in (429, 503) else None)
        headers = [f"{key.decode()}: {value.decode()}" for key, value in response.headers]
        shown[name] = {"headers": headers, "body": json.loads(response.body)}
        assert shown[name]["body"]["error"].keys() == SHAPE
        assert 400 <= response.status < 600
    text = json.dumps(shown, indent=1) + "\n"
    if os.environ.get("KEYHOLE_RENEW_GOLDEN"):
        GOLDEN.parent.mkdir(parents=True, exist_ok=True)
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text()
