"""Devices without a name: blind tokens are signed once, taken once, and fetch the same slices."""

import stat
import time
from functools import partial

import pytest

from keyhole.crypto.blind import BlindSigner
from keyhole.delivery.pir.two_server import TwoServerPir
from keyhole.device.admission import redeem, signed_tokens
from keyhole.device.private import QueryFetch
from keyhole.errors import (
    ConflictError,
    MalformedError,
    NotAdmittedError,
    ReplayError,
    RequestError,
    ServiceError,
    TooLargeError,
)
from keyhole.service.access import Access, Keyring
from keyhole.service.admission import AdmissionFiles, BlindAdmission, KeysOf, admission_routes
from keyhole.service.app import App
from keyhole.service.private import query_routes
from keyhole.service.transport import serving
from keyhole.wire.http import HttpClient
from keyhole.wire.private import QuerySettings, blind_token, queries_at, role_named
from tests.helpers import LAYOUTS, assert_trees_equal
from tests.service.pir.pair import second_device
from tests.service.recorder import Recorder
from tests.service.small_service import Service

ROUND = "3-" + "a" * 64
LAYOUT = LAYOUTS["rows"]
RING = Keyring((b"k" * 32,))


def token_of(admission, place="queries/0", device="phone", round_id=ROUND):
    """A token as a device has it signed."""
    blinded = blind_token(admission.public(round_id), round_id, place)
    return blinded.message + blinded.finish(admission.sign(round_id, device, blinded.sent))


@pytest.fixture
def admission(tmp_path):
    return BlindAdmission(AdmissionFiles(tmp_path))


def test_a_token_is_taken_once_also_after_a_restart(admission, tmp_path):
    token = token_of(admission)
    admission.take(ROUND, "queries/0", [token])
    for again in (admission, BlindAdmission(AdmissionFiles(tmp_path))):
        with pytest.raises(ReplayError, match="before"):
            again.take(ROUND, "queries/0", [token])


def test_what_a_crash_left_of_a_nonce_neither_counts_nor_moves_the_others(admission, tmp_path):
    first, second = token_of(admission), token_of(admission, device="other")
    admission.take(ROUND, "queries/0", [first])
    spent = tmp_path / "admission" / ROUND / "spent"
    spent.write_bytes(spent.read_bytes() + b"half")
    for token, again in ((second, AdmissionFiles(tmp_path)), (None, AdmissionFiles(tmp_path))):
        if token is not None:
            BlindAdmission(again).take(ROUND, "queries/0", [token])
        with pytest.raises(ReplayError):
            BlindAdmission(again).take(ROUND, "queries/0", [first])
        with pytest.raises(ReplayError):
            BlindAdmission(again).take(ROUND, "queries/0", [second])


def test_processes_that_share_a_directory_take_a_token_once(admission, tmp_path):
    """Each has read the file before the other writes to it."""
    both = admission, BlindAdmission(AdmissionFiles(tmp_path))
    tokens = [token_of(admission, device=f"device-{n}") for n in range(4)]
    for each, token in zip(both, tokens, strict=False):
        each.take(ROUND, "queries/0", [token])
    both[0].take(ROUND, "queries/0", [tokens[2]])
    for each in both:
        for token in tokens[:3]:
            with pytest.raises(ReplayError):
                each.take(ROUND, "queries/0", [token])
    assert (tmp_path / "admission" / ROUND / "spent").stat().st_size == 3 * 32
    both[1].take(ROUND, "queries/0", [tokens[3]])


def test_a_device_counts_as_no_more_than_eight_at_one_server(admission):
    blinded = [blind_token(admission.public(ROUND), ROUND, "queries/0") for _ in range(9)]
    with pytest.raises(TooLargeError):
        admission.sign(ROUND, "phone", b"".join(each.sent for each in blinded))
    signed = admission.sign(ROUND, "phone", b"".join(each.sent for each in blinded[:8]))
    with pytest.raises(ConflictError):
        admission.sign(ROUND, "phone", blinded[8].sent)
    tokens = [
        each.message + each.finish(signed[256 * n : 256 * (n + 1)])
        for n, each in enumerate(blinded[:8])
    ]
    admission.take(ROUND, "queries/0", tokens)


def test_a_run_that_begins_anew_admits_devices_beside_older_rounds_of_higher_numbers(admission):
    for number in (7, 8, 9, 10, 0):
        round_id = f"{number}-" + "b" * 64
        token = token_of(admission, round_id=round_id)
        admission.take(round_id, "queries/0", [token])
        with pytest.raises(ReplayError):
            admission.take(round_id, "queries/0", [token])
    kept = {each.name[:2] for each in (admission.files.directory / "admission").iterdir()}
    assert kept == {"8-", "9-", "10", "0-"}


def test_tokens_are_taken_all_or_none(admission):
    one, other = token_of(admission), token_of(admission, device="b")
    with pytest.raises(ReplayError):
        admission.take(ROUND, "queries/0", [one, one])
    with pytest.raises(MalformedError):
        admission.take(ROUND, "queries/0", [one, other[:-1] + bytes([other[-1] ^ 1])])
    admission.take(ROUND, "queries/0", [one, other])


def test_a_token_counts_in_its_round_and_place_alone(admission):
    token, later = token_of(admission), "4-" + "a" * 64
    for round_id, place in ((ROUND, "queries/1"), (ROUND, "gateway"), (later, "queries/0")):
        with pytest.raises(MalformedError):
            admission.take(round_id, place, [token])
    # Nor one that names a later round but was signed by the key of this one.
    hoarded = blind_token(admission.public(ROUND), later, "queries/0")
    signed = hoarded.message + hoarded.finish(admission.sign(ROUND, "hoarder", hoarded.sent))
    with pytest.raises(MalformedError):
        admission.take(later, "queries/0", [signed])


def test_a_device_has_tokens_signed_once_and_the_same_again(admission, tmp_path):
    key = admission.public(ROUND)
    sent = blind_token(key, ROUND, "queries/0").sent
    answer = admission.sign(ROUND, "phone", sent)
    again = BlindAdmission(AdmissionFiles(tmp_path))  # with the key of the round, from its file
    assert again.sign(ROUND, "phone", sent) == answer
    with pytest.raises(ConflictError):
        again.sign(ROUND, "phone", blind_token(key, ROUND, "queries/0").sent)
    for asked in (b"", sent[:-1], sent * 9):
        with pytest.raises(TooLargeError):
            again.sign(ROUND, "other", asked)
    for path in (tmp_path / "admission" / ROUND).iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_files_of_old_rounds_go(admission, tmp_path):
    for number in range(12):
        admission.public(f"{number}-{'a' * 64}")
    left = [path.name.partition("-")[0] for path in (tmp_path / "admission").iterdir()]
    assert sorted(map(int, left)) == [8, 9, 10, 11]


@pytest.fixture
def two(tmp_path):
    """A coordinator that is server 0, and server 1, which knows no device; both want tokens."""
    made = Two()
    routes = partial(routes_of, made)
    service = Service(
        tmp_path / "rounds", lambda r: routes(r, 0, tmp_path / "first", None), access=Access(RING)
    )
    service.keyring = RING
    with service.publisher, serving(Recorder(service.app)) as url:
        service.url = url
        keys = KeysOf(HttpClient(url))
        extra = routes(service.rounds, 1, tmp_path / "second", keys)
        own = Access(Keyring((b"2" * 32,)))
        made.seen = Recorder(App(service.rounds, access=own, extra_routes=extra))
        with serving(made.seen) as made.second:
            made.service = service
            yield made
        keys.client.close()
    service.rounds.close()


class Two:
    """What a test sees of both."""


def routes_of(made, rounds, server, directory, keys):
    settings = QuerySettings(role_named(str(server)), max_keys=3)
    admission = BlindAdmission(AdmissionFiles(directory), keys)
    return [query_routes(rounds, settings), admission_routes(rounds, admission, server)]


def test_a_device_without_a_name_fetches_the_slices_of_its_keys(two):
    state = two.service.publish(LAYOUT)
    with two.service.device(name="phone-17") as device, second_device(two.second) as other:
        told, keys = device.check_in(), {"row": [5, 0]}
        found = QueryFetch(TwoServerPir(), (other,), anonymous=True)(device, told, keys)
        assert_trees_equal(found.model, state.select(tuple(found.keys.values())))
        with pytest.raises(RequestError):  # by name, it is nobody at the second
            QueryFetch(TwoServerPir(), (other,))(device, told, keys)


def test_a_server_is_shown_neither_the_name_nor_what_the_first_signed(two):
    two.service.publish(LAYOUT)
    with two.service.device(name="phone-17") as device, second_device(two.second) as other:
        told = device.check_in()
        (token,) = signed_tokens(device, told, [queries_at(1)], [other])
        guest = redeem(other, told, token)
        claims = Keyring((b"2" * 32,)).verify(guest.token.encode(), time.time())
        assert (claims.kind, claims.device[:6]) == ("query", "guest-")
        with pytest.raises(ReplayError):
            redeem(other, told, token)


def test_a_guest_sends_no_update(two):
    two.service.publish(LAYOUT)
    with two.service.device(name="phone-17") as device:
        told = device.check_in()
        (token,) = signed_tokens(device, told, [queries_at(0)], [])
        guest = redeem(device, told, token)
        path = f"/v1/rounds/{told.round}/updates"
        with pytest.raises(NotAdmittedError):
            device.client.send(path, b"", token=guest.token, limit=99, content_type="text/plain")


def test_services_that_name_different_keys_are_left(two, monkeypatch):
    """A coordinator that gave a device a key of its own would know it by its token."""
    two.service.publish(LAYOUT)
    with two.service.device(name="phone-17") as device, second_device(two.second) as other:
        told = device.check_in()
        other.client.get(f"/v1/rounds/{told.round}/admission", limit=10**4)  # it knows the key
        monkeypatch.setattr(AdmissionFiles, "signer", lambda *_: BlindSigner.fresh())
        with pytest.raises(ServiceError, match="2 keys"):
            signed_tokens(device, told, [queries_at(0)], [other])
