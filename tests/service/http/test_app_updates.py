"""Who may take part: tokens, check-in, and the update of a device."""

import asyncio
from functools import partial

import httpx
import numpy as np
import pytest

from keyhole.service.access import Access, Keyring
from keyhole.service.limits import Limits
from keyhole.service.spool import UpdateSpool
from keyhole.wire import messages as wire
from keyhole.wire.assignment import Current
from keyhole.wire.settings import sum_settings
from tests.helpers import DIGEST
from tests.service.in_process import (
    BINARY,
    NOW,
    RING,
    WORD_TABLE,
    Service,
    bearer,
    device_token,
    round_token,
    send_update,
    update_of,
)
from tests.service.memory_rounds import WORDS, layout


@pytest.fixture
def taking(tmp_path):
    """A service that takes updates."""
    return Service(spool=UpdateSpool(tmp_path / "updates"))


@pytest.fixture
def service():
    return Service()


def test_reads_with_tokens_are_for_the_round_and_kept_from_shared_caches():
    service = Service(access=Access(RING, reads_need_token=True))
    path = "/v1/rounds/{id}/manifest"
    answer = service.ask("GET", path, headers=bearer(round_token(service)))
    assert answer.headers["cache-control"].startswith("private, ")
    answer = service.ask("GET", path)
    service.assert_refused(answer, 401, "AccessError")
    assert answer.headers["www-authenticate"] == "Bearer"
    old = round_token(service, now=NOW - 1000)
    service.assert_refused(service.ask("GET", path, headers=bearer(old)), 401, "UntimelyError")
    other = round_token(service, round_id=f"9-{DIGEST}")
    service.assert_refused(service.ask("GET", path, headers=bearer(other)), 403, "NotAdmittedError")
    current = "/v1/rounds/current"
    service.assert_refused(service.ask("GET", current), 401, "AccessError")
    assert service.ask("GET", current, headers=bearer(device_token())).status_code == 200


def test_open_reads_look_at_no_token(service):
    headers = {"authorization": "Bearer junk"}
    assert service.ask("GET", "/v1/rounds/{id}/manifest", headers=headers).status_code == 200


def test_a_token_may_allow_fewer_keys_than_the_service():
    service = Service(access=Access(RING, reads_need_token=True))
    headers = bearer(round_token(service, max_keys=2))
    assert service.query(wire.Ask(1, np.arange(2)), **headers).status_code == 200
    answer = service.query(wire.Ask(1, np.arange(3)), **headers)
    service.assert_refused(answer, 403, "NotAdmittedError")


def test_a_device_checks_in_and_gets_a_token_of_the_round(taking):
    answer = taking.ask("POST", "/v1/checkin", headers=bearer(device_token(max_keys=9)))
    told = answer.json()
    assert (told["round"], told["number"], told["fetch_after"]) == (taking.round.id, 3, 2.0)
    claims = RING.verify(told["token"].encode(), NOW)
    assert (claims.kind, claims.device, claims.round) == ("round", "phone-1", taking.round.id)
    assert claims.max_keys == 9


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


def test_a_device_waits_as_soon_as_the_round_takes_no_more_updates(taking):
    """The spool is closed first; that the current round is closed is known a moment later."""
    taking.spool.close(taking.round.id)
    answer = taking.ask("POST", "/v1/checkin", headers=bearer(device_token()))
    assert answer.json() == {"wait": 5.0}


def test_who_is_let_in_and_what_is_taken_hangs_on_the_newest_round(taking):
    """Not on what this worker has read a moment ago: another one may have told the device."""
    now, before = taking.rounds.now, Current(f"2-{DIGEST}", 2, "closed")
    taking.rounds.current = lambda newest=False: now if newest else before
    assert "token" in taking.ask("POST", "/v1/checkin", headers=bearer(device_token())).json()
    assert send_update(taking).status_code == 201
    taking.rounds.current = lambda newest=False: before if newest else now
    answer = taking.ask("POST", "/v1/checkin", headers=bearer(device_token()))
    assert answer.json() == {"wait": 5.0}
    taking.assert_refused(
        send_update(taking, token=round_token(taking, device="phone-9")), 410, "TooLateError"
    )


def test_checking_in_takes_a_device_token(taking):
    taking.assert_refused(taking.ask("POST", "/v1/checkin"), 401, "AccessError")
    headers = bearer(round_token(taking))
    taking.assert_refused(
        taking.ask("POST", "/v1/checkin", headers=headers), 403, "NotAdmittedError"
    )


def test_an_update_is_stored_once(taking):
    first, again = send_update(taking), send_update(taking)
    assert (first.status_code, first.json()) == (201, {"update": "stored"})
    assert (again.status_code, again.json()) == (200, {"update": "known"})
    assert taking.spool.read(taking.round.id, "phone-1") == update_of()
    taking.assert_refused(send_update(taking, update_of(2.0)), 409, "ConflictError")
    assert taking.spool.read(taking.round.id, "phone-1") == update_of()


def test_an_update_needs_a_token_of_the_round(taking):
    taking.assert_refused(send_update(taking, token=device_token()), 403, "NotAdmittedError")
    taking.assert_refused(send_update(taking, token="kh2.x.y"), 401, "AccessError")
    foreign = Keyring((b"x" * 32,)).issue(
        "round", "phone-1", now=NOW, seconds=60.0, round_id=taking.round.id
    )
    taking.assert_refused(send_update(taking, token=foreign), 401, "AccessError")


def test_an_update_of_a_closed_or_older_round_is_410(taking):
    taking.rounds.now = Current(taking.round.id, 3, "closed")
    taking.assert_refused(send_update(taking), 410, "TooLateError")
    token, path = round_token(taking), f"/v1/rounds/{taking.round.id}/updates"
    taking.round = taking.rounds.open(4)
    answer = taking.ask("POST", path, content=update_of(), headers={**BINARY, **bearer(token)})
    taking.assert_refused(answer, 410, "TooLateError")


def test_a_device_outside_the_cohort_is_403(tmp_path):
    service = Service(spool=UpdateSpool(tmp_path / "updates"), cohort={"phone-2": 0})
    service.assert_refused(send_update(service), 403, "NotAdmittedError")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3e38, -(2.0**109)])
def test_an_update_that_cannot_be_added_up_is_refused(taking, value):
    taking.assert_refused(send_update(taking, update_of(value)), 400, "NotFiniteError")
    assert taking.spool.devices(taking.round.id) == []


@pytest.mark.parametrize("change", [b"", b"x", update_of()[:-1], update_of() + b"\x00"])
def test_an_update_that_cannot_be_read_is_400(taking, change):
    taking.assert_refused(send_update(taking, change), 400, "RequestError")


def test_an_update_with_a_flipped_bit_is_refused(taking):
    for place in range(len(update_of())):
        changed = bytearray(update_of())
        changed[place] ^= 4
        assert send_update(taking, bytes(changed)).status_code == 400
    assert taking.spool.devices(taking.round.id) == []


def test_an_update_beyond_the_limit_is_413(tmp_path):
    service = Service(spool=UpdateSpool(tmp_path / "u"), limits=Limits(max_body=50))
    service.assert_refused(send_update(service), 413, "TooLargeError")


def test_no_room_is_kept_for_more_than_the_layout_allows(tmp_path):
    service = Service(spool=UpdateSpool(tmp_path / "u"), limits=Limits(max_keys=6))
    longest = wire.MAX_REPORT + 12 + len(update_of(keys=(3, 5, 3, 5, 0, 1)))
    assert longest == wire.max_update_bytes(layout(), 6)
    answer = send_update(service, b"x" * longest)
    service.assert_refused(answer, 400, "RequestError")
    answer = send_update(service, b"x", **{"content-length": f"{longest + 1}"})
    service.assert_refused(answer, 413, "TooLargeError")


def test_a_token_does_not_take_the_room_of_other_devices(tmp_path):
    """However many connections it has, and in how many rounds: two updates are under way."""
    limits = Limits(max_body=1000, max_held=3000, waiting=1)
    service = Service(spool=UpdateSpool(tmp_path / "updates"), limits=limits)
    path = f"/v1/rounds/{service.round.id}/updates"

    async def story():
        go, begun = asyncio.Event(), asyncio.Semaphore(0)

        async def drip():
            begun.release()
            yield b"x"
            await go.wait()

        transport = httpx.ASGITransport(service.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            headers = BINARY | bearer(round_token(service)) | {"content-length": "1000"}
            post = partial(client.post, path, headers=headers)
            held = [asyncio.create_task(post(content=drip())) for _ in range(2)]
            for _ in held:
                await begun.acquire()
            refused = [await post(content=b"x" * 1000) for _ in range(16)]
            other = BINARY | bearer(round_token(service, device="phone-2"))
            taken = await client.post(path, content=update_of(), headers=other)
            go.set()
            await asyncio.gather(*held)
            again = await post(content=b"x" * 1000)
            return refused, taken, again

    refused, taken, again = asyncio.run(story())
    for answer in refused:
        service.assert_refused(answer, 429, "TooManyError")
        assert int(answer.headers["retry-after"]) >= 1
    assert (taken.status_code, again.status_code) == (201, 400)


def test_slow_uploads_hold_up_uploads_and_not_reads(tmp_path):
    limits = Limits(max_body=1000, max_held=1000, waiting=1)
    service = Service(spool=UpdateSpool(tmp_path / "updates"), limits=limits)

    async def story():
        begun, go = asyncio.Event(), asyncio.Event()

        async def slow():
            begun.set()
            await go.wait()
            yield update_of()

        transport = httpx.ASGITransport(service.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            headers = {**BINARY, **bearer(round_token(service))}
            path = f"/v1/rounds/{service.round.id}"
            first = asyncio.create_task(
                client.post(f"{path}/updates", content=slow(), headers=headers)
            )
            await begun.wait()
            second = asyncio.create_task(
                client.post(f"{path}/updates", content=update_of(), headers=headers)
            )
            read = await client.get(f"{path}/manifest")
            body = wire.encode_query([wire.Ask(WORD_TABLE, np.arange(WORDS))])
            asked = await client.post(f"{path}/slices", content=body, headers=BINARY)
            go.set()
            return read, asked, await first, await second

    answers = asyncio.run(story())
    assert [answer.status_code for answer in answers] == [200, 200, 201, 200]


def test_a_disk_that_refuses_is_507(taking, tmp_path):
    (tmp_path / "updates").write_text("not a directory")
    taking.assert_refused(send_update(taking), 507, "StorageError")


@pytest.mark.parametrize("when", ["current", "trailing"])
def test_a_round_that_is_added_up_by_aggregators_takes_no_update_in_the_clear(
    taking, tmp_path, when
):
    """Whatever the device that sends it believes: nothing of the body is read, nothing stays."""
    taking.round = taking.rounds.open(4, **sum_settings(b"params"))
    if when == "trailing":
        taking.rounds.now = Current(taking.round.id, 4, "closed", trailing=(taking.round.id,))

    async def unread():
        pytest.fail("read a body that it must not have")
        yield update_of()

    facts = taking.assert_refused(send_update(taking, unread()), 400, "RequestError")
    assert facts["fix"] == "no update was taken; start the device with --aggregators"
    assert not (tmp_path / "updates").exists()


def test_a_service_without_a_spool_takes_no_updates(service):
    answer = send_update(service)
    service.assert_refused(answer, 404, "NotFoundError")
    assert "--token-key" not in answer.json()["error"]["fix"]  # it has one
    only_reads = Service(access=Access())
    answer = only_reads.ask("POST", "/v1/checkin")
    only_reads.assert_refused(answer, 404, "NotFoundError")
    assert "--token-key" in answer.json()["error"]["fix"]


def test_an_update_of_a_trailing_round_is_taken_even_when_its_slices_are_gone(taking):
    token, earlier = round_token(taking), taking.round.id
    path, headers = f"/v1/rounds/{earlier}/updates", {**BINARY, **bearer(token)}
    newest = taking.rounds.open(4)
    taking.rounds.removed.add(earlier)
    taking.rounds.now = Current(newest.id, 4, "open", {}, trailing=(earlier,))
    answer = taking.ask("POST", path, content=update_of(), headers=headers)
    assert (answer.status_code, answer.json()) == (201, {"update": "stored"})
    assert taking.spool.read(earlier, "phone-1") == update_of()
    other = device_token()
    refused = taking.ask("POST", path, content=update_of(), headers={**BINARY, **bearer(other)})
    taking.assert_refused(refused, 403, "NotAdmittedError")
    bad = taking.ask("POST", path, content=b"junk", headers=headers)
    taking.assert_refused(bad, 400, "RequestError")
    taking.rounds.now = Current(newest.id, 4, "closed", trailing=(earlier,))
    assert taking.ask("POST", path, content=update_of(), headers=headers).status_code == 200


def test_a_round_that_is_closed_and_trails_takes_updates_and_no_devices(taking):
    taking.rounds.now = Current(taking.round.id, 3, "closed", trailing=(taking.round.id,))
    assert taking.ask("POST", "/v1/checkin", headers=bearer(device_token())).json() == {"wait": 5.0}
    assert send_update(taking).status_code == 201
    shown = taking.ask("GET", "/v1/rounds/current").json()
    assert shown["trailing"] == [taking.round.id]
