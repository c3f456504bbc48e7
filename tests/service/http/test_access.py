"""Tokens: whoever does not hold a key can make none, change none and stretch none."""

import base64
import hmac
import json
from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyhole.errors import AccessError, InputError, NotAdmittedError
from keyhole.service.access import (
    LEEWAY,
    Access,
    DenyList,
    Keyring,
    check_device_name,
    new_key,
)
from tests.helpers import DIGEST

NOW = 1_800_000_000.0
ROUND = f"3-{DIGEST}"
RING = Keyring((b"a" * 32,))
TOKEN = RING.issue("device", "phone-1", now=NOW, seconds=60.0).encode()


def bearer(token):
    return {b"authorization": b"Bearer " + (token if isinstance(token, bytes) else token.encode())}


def forge(payload, key=b"a" * 32, prefix=b"kh2."):
    """A token with any payload, signed with a key."""
    signed = prefix + base64.urlsafe_b64encode(payload).rstrip(b"=")
    signature = base64.urlsafe_b64encode(hmac.digest(key, signed, sha256)).rstrip(b"=")
    return signed + b"." + signature


def claims(**changes):
    known = {"version": 2, "id": "0" * 32, "audience": "slices"}
    known |= {"kind": "device", "device": "phone-1"}
    times = {"issued": NOW, "expires": NOW + 60.0, "round": None, "max_keys": None}
    return json.dumps({**known, **times, **changes}).encode()


def test_a_token_says_what_it_was_issued_for():
    token = RING.issue("round", "p.1_x", now=NOW, seconds=5.0, round_id=ROUND, max_keys=7)
    found = RING.verify(token.encode(), NOW + 1.0)
    assert (found.kind, found.device, found.round, found.max_keys) == ("round", "p.1_x", ROUND, 7)
    assert (found.issued, found.expires) == (NOW, NOW + 5.0)


def test_every_truncation_is_refused():
    for length in range(len(TOKEN)):
        with pytest.raises(AccessError):
            RING.verify(TOKEN[:length], NOW)


def test_every_flipped_bit_is_refused():
    for place in range(len(TOKEN)):
        for bit in range(8):
            changed = bytearray(TOKEN)
            changed[place] ^= 1 << bit
            with pytest.raises(AccessError):
                RING.verify(bytes(changed), NOW)


@pytest.mark.parametrize("more", [b".", b"=", b" ", b"\n", b"A", b"\x00"])
def test_bytes_behind_a_token_are_refused(more):
    for changed in (TOKEN + more, more + TOKEN):
        with pytest.raises(AccessError):
            RING.verify(changed, NOW)


def test_another_spelling_of_the_signature_is_refused():
    # 43 characters hold 258 bits; the last two are not part of the signature.
    alphabet = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
    last = alphabet.index(TOKEN[-1:])
    others = [alphabet[(last & ~3) + spare : (last & ~3) + spare + 1] for spare in range(4)]
    spelled = [TOKEN[:-1] + other for other in others if other != TOKEN[-1:]]
    assert len(spelled) == 3
    for changed in [*spelled, TOKEN.replace(b"-", b"+").replace(b"_", b"/") + b"="]:
        with pytest.raises(AccessError):
            RING.verify(changed, NOW)


def test_a_token_of_another_key_is_refused():
    with pytest.raises(AccessError, match="not signed here"):
        Keyring((b"b" * 32,)).verify(TOKEN, NOW)


def test_all_keys_verify_and_the_first_signs():
    both = Keyring((b"b" * 32, b"a" * 32))
    assert both.verify(TOKEN, NOW).device == "phone-1"
    fresh = both.issue("device", "x", now=NOW, seconds=1.0).encode()
    assert Keyring((b"b" * 32,)).verify(fresh, NOW).device == "x"
    with pytest.raises(AccessError):
        RING.verify(fresh, NOW)


@pytest.mark.parametrize(
    "token",
    [
        b"",
        b"kh2",
        b"kh2..",
        b"kh1." + TOKEN[4:],
        base64.urlsafe_b64encode(b'{"alg":"none"}') + b"." + claims() + b".",
        forge(claims(), prefix=b"kh1."),
        forge(claims(), prefix=b"none."),
        forge(claims(), key=b""),
        b"kh2." + base64.urlsafe_b64encode(claims()).rstrip(b"=") + b"." + b"A" * 43,
    ],
)
def test_a_token_cannot_choose_how_it_is_checked(token):
    with pytest.raises(AccessError):
        RING.verify(token, NOW)


@pytest.mark.parametrize(
    "payload",
    [
        claims(version=1),
        claims(id="x"),
        claims(audience="everyone"),
        claims(alg="none"),
        claims(kind="admin"),
        claims(device="../x"),
        claims(device=""),
        claims(expires="never"),
        claims(max_keys=1.5),
        b"null",
        b"",
        b"\xff",
    ],
)
def test_a_signed_payload_of_another_version_is_refused(payload):
    with pytest.raises(AccessError):
        RING.verify(forge(payload), NOW)


def test_a_huge_token_is_refused_before_it_is_hashed():
    with pytest.raises(AccessError, match="malformed"):
        RING.verify(forge(claims(device="x" * 2000)), NOW)


@pytest.mark.parametrize(
    ("now", "is_good"),
    [
        (NOW - LEEWAY - 1, False),
        (NOW - LEEWAY, True),
        (NOW, True),
        (NOW + 60 + LEEWAY - 1, True),
        (NOW + 60 + LEEWAY, False),
        (NOW + 1e9, False),
        (float("nan"), False),
    ],
)
def test_a_token_is_good_in_its_time_give_or_take_a_clock_jump(now, is_good):
    ring = Keyring((b"a" * 32,))
    for _ in range(2):  # the second time it is known already
        if is_good:
            assert ring.verify(TOKEN, now).device == "phone-1"
        else:
            with pytest.raises(AccessError, match="expired"):
                ring.verify(TOKEN, now)


def test_known_tokens_are_bounded():
    ring = Keyring((b"a" * 32,))
    for number in range(16_385):
        ring.verify(ring.issue("device", f"d{number}", now=NOW, seconds=1.0).encode(), NOW)
    assert len(ring._known) <= 16_384


@given(st.binary(max_size=200))
def test_no_bytes_are_a_token_by_chance(token):
    with pytest.raises(AccessError):
        RING.verify(token, NOW)


def test_keys_are_read_from_a_private_file(tmp_path):
    path = tmp_path / "keys"
    keys = [new_key(), new_key()]
    path.write_text("\n".join(keys) + "\n")
    path.chmod(0o600)
    assert Keyring.load(path).keys == tuple(bytes.fromhex(key) for key in keys)
    assert len(set(keys)) == 2


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o620, 0o601])
def test_a_key_file_that_others_may_touch_is_refused(tmp_path, mode):
    path = tmp_path / "keys"
    path.write_text(new_key())
    path.chmod(mode)
    with pytest.raises(InputError, match="chmod 600"):
        Keyring.load(path)


@pytest.mark.parametrize("text", ["", "abc", "zz" * 32, "ab" * 31, "ab" * 32 + "\nab", "é" * 64])
def test_a_file_of_something_else_is_refused_without_showing_it(tmp_path, text):
    path = tmp_path / "keys"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(InputError) as caught:
        Keyring.load(path)
    assert text == "" or text not in str(caught.value)


def test_a_missing_file_is_an_input_error(tmp_path):
    with pytest.raises(InputError, match="new-key"):
        Keyring.load(tmp_path / "none")


def test_keys_are_not_printed():
    ring = Keyring((b"secret" * 8,))
    assert repr(ring) == "Keyring(1 keys)"
    assert "secret" not in repr(Access(ring))


@pytest.mark.parametrize("name", ["", ".x", "-x", "a/b", "a\n", "x" * 65, "é", "a\x00", ".."])
def test_a_name_that_is_no_file_name_is_refused(name):
    with pytest.raises(InputError):
        check_device_name(name)


def test_no_token_is_401_and_a_good_one_for_something_else_403():
    access = Access(RING, reads_need_token=True)
    of_round = RING.issue("round", "phone-1", now=NOW, seconds=60.0, round_id=ROUND)
    assert access.member(bearer(of_round), ROUND, NOW).device == "phone-1"
    assert access.device(bearer(TOKEN), NOW).device == "phone-1"
    for headers in ({}, {b"authorization": b"Basic x"}, {b"authorization": b"Bearer "}):
        with pytest.raises(AccessError):
            access.member(headers, ROUND, NOW)
    with pytest.raises(NotAdmittedError):
        access.member(bearer(of_round), f"4-{DIGEST}", NOW)
    with pytest.raises(NotAdmittedError):
        access.member(bearer(TOKEN), ROUND, NOW)
    with pytest.raises(NotAdmittedError):
        access.device(bearer(of_round), NOW)


def test_reads_cannot_need_tokens_that_nobody_can_check():
    with pytest.raises(InputError):
        Access(None, reads_need_token=True)
    with pytest.raises(AccessError):
        Access(None).device(bearer(TOKEN), NOW)


def test_a_token_counts_at_the_kind_of_service_that_it_is_for():
    for audience in ("slices", "aggregator", "relay"):
        token = RING.issue("device", "phone-1", now=NOW, seconds=60.0, audience=audience)
        assert Access(RING, audience=audience).device(bearer(token), NOW).audience == audience
        for other in {"slices", "aggregator", "relay"} - {audience}:
            said = f"another kind of service: got {audience}; expected {other}"
            with pytest.raises(NotAdmittedError, match=said):
                Access(RING, audience=other).device(bearer(token), NOW)


def test_tokens_have_ids_that_differ():
    made = [RING.issue("device", "x", now=NOW, seconds=1.0).encode() for _ in range(50)]
    assert len({RING.verify(token, NOW).id for token in made}) == 50


@pytest.fixture
def denied(tmp_path):
    """A deny list, its file, and a clock that the test sets."""
    clock = [0.0]
    path = tmp_path / "deny"
    path.write_text(f"{'a' * 32}  # lost in a train\n\n# none\n")
    return DenyList(path, clock=lambda: clock[0]), path, clock


def test_a_denied_id_is_refused_and_the_list_is_read_again_when_it_changes(denied):
    listed, path, clock = denied
    access = Access(RING, denied=listed)
    tokens = [RING.issue("device", "p", now=NOW, seconds=60.0, token_id=i * 32) for i in ("a", "b")]
    with pytest.raises(AccessError, match="revoked"):
        access.device(bearer(tokens[0]), NOW)
    assert access.device(bearer(tokens[1]), NOW).device == "p"  # and is remembered as verified
    path.write_text(f"{'b' * 32}\n")
    clock[0] = 1.0
    with pytest.raises(AccessError, match="revoked"):
        access.device(bearer(tokens[1]), NOW)
    assert access.device(bearer(tokens[0]), NOW).device == "p"


@pytest.mark.parametrize("content", [None, b"nonsense\n" + b"b" * 32, b"\xff\xfe"])
def test_a_deny_list_that_cannot_be_read_takes_nothing_back(denied, content, caplog):
    listed, path, clock = denied
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)
    clock[0] = 1.0
    assert "a" * 32 in listed
    assert ("b" * 32 in listed) == (content is not None and b"b" in content)
    assert "stays denied" in caplog.text


def test_a_service_does_not_start_with_a_deny_list_that_is_none(tmp_path):
    (tmp_path / "deny").write_text("phone-17\n")
    for name in ("deny", "missing"):
        with pytest.raises(InputError, match="deny list"):
            DenyList(tmp_path / name)
