"""HPKE: equal to the RFC's vectors and to two other implementations; nothing damaged is opened."""

import pytest
from cryptography.hazmat.primitives import hpke as reference
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from hypothesis import given, settings
from hypothesis import strategies as st
from pyhpke import AEADId, CipherSuite, KDFId, KEMId, KEMKey

from keyhole.crypto import hpke
from keyhole.crypto.hpke import (
    AES_128_GCM,
    CHACHA20_POLY1305,
    PrivateKey,
    open_from,
    seal_to,
    suite_of,
)
from keyhole.crypto.prg import Prg
from keyhole.errors import InputError, MalformedError

SUITES = [AES_128_GCM, CHACHA20_POLY1305]
PLAIN = b"Beauty is truth, truth beauty"
INFO = b"Ode on a Grecian Urn"

# RFC 9180, A.1.1 and A.2.1: base mode, X25519, HKDF-SHA256. Sealed messages by sequence number,
# exported values by context.
AES_VECTOR = {
    "suite": AES_128_GCM,
    "enc": "37fda3567bdbd628e88668c3c8d7e97d1d1253b6d4ea6d44c150f741f1bf4431",
    "ephemeral": "52c4a758a802cd8b936eceea314432798d5baf2d7e9235dc084ab1b9cfa2f736",
    "public": "3948cfe0ad1ddb695d780e59077195da6c56506b027329794ab02bca80815c4d",
    "private": "4612c550263fc8ad58375df3f557aac531d26850903e55a9f23f21d8534e8ac8",
    "shared": "fe0e18c9f024ce43799ae393c7e8fe8fce9d218875e8227b0187c04e7d2ea1fc",
    "key": "4531685d41d65f03dc48f6b8302c05b0",
    "base_nonce": "56d890e5accaaf011cff4b7d",
    "exporter_secret": "45ff1c2e220db587171952c0592d5f5ebe103f1561a2614e38f2ffd47e99e3f8",
    "sealed": {
        0: "f938558b5d72f1a23810b4be2ab4f84331acc02fc97babc53a52ae8218a355a9"
        "6d8770ac83d07bea87e13c512a",
        1: "af2d7e9ac9ae7e270f46ba1f975be53c09f8d875bdc8535458c2494e8a6eab25"
        "1c03d0c22a56b8ca42c2063b84",
        2: "498dfcabd92e8acedc281e85af1cb4e3e31c7dc394a1ca20e173cb7251649158"
        "8d96a19ad4a683518973dcc180",
        4: "583bd32bc67a5994bb8ceaca813d369bca7b2a42408cddef5e22f880b631215a"
        "09fc0012bc69fccaa251c0246d",
        255: "7175db9717964058640a3a11fb9007941a5d1757fda1a6935c805c21af32505b"
        "f106deefec4a49ac38d71c9e0a",
        256: "957f9800542b0b8891badb026d79cc54597cb2d225b54c00c5238c25d05c30e3"
        "fbeda97d2e0e1aba483a2df9f2",
    },
    "exported": {
        b"": "3853fe2b4035195a573ffc53856e77058e15d9ea064de3e59f4961d0095250ee",
        b"\0": "2e8f0b54673c7029649d4eb9d5e33bf1872cf76d623ff164ac185da9e88c21a5",
        b"TestContext": "e9e43065102c3836401bed8c3c3c75ae46be1639869391d62c61f1ec7af54931",
    },
}
CHACHA_VECTOR = {
    "suite": CHACHA20_POLY1305,
    "enc": "1afa08d3dec047a643885163f1180476fa7ddb54c6a8029ea33f95796bf2ac4a",
    "ephemeral": "f4ec9b33b792c372c1d2c2063507b684ef925b8c75a42dbcbf57d63ccd381600",
    "public": "4310ee97d88cc1f088a5576c77ab0cf5c3ac797f3d95139c6c84b5429c59662a",
    "private": "8057991eef8f1f1af18f4a9491d16a1ce333f695d4db8e38da75975c4478e0fb",
    "shared": "0bbe78490412b4bbea4812666f7916932b828bba79942424abb65244930d69a7",
    "key": "ad2744de8e17f4ebba575b3f5f5a8fa1f69c2a07f6e7500bc60ca6e3e3ec1c91",
    "base_nonce": "5c4d98150661b848853b547f",
    "exporter_secret": "a3b010d4994890e2c6968a36f64470d3c824c8f5029942feb11e7a74b2921922",
    "sealed": {
        0: "1c5250d8034ec2b784ba2cfd69dbdb8af406cfe3ff938e131f0def8c8b60b4db"
        "21993c62ce81883d2dd1b51a28",
        1: "6b53c051e4199c518de79594e1c4ab18b96f081549d45ce015be002090bb119e"
        "85285337cc95ba5f59992dc98c",
        4: "63357a2aa291f5a4e5f27db6baa2af8cf77427c7c1a909e0b37214dd47db122b"
        "b153495ff0b02e9e54a50dbe16",
        256: "7a4a13e9ef23978e2c520fd4d2e757514ae160cd0cd05e556ef692370ca53076"
        "214c0c40d4c728d6ed9e727a5b",
    },
    "exported": {
        b"": "4bbd6243b8bb54cec311fac9df81841b6fd61f56538a775e7c80a9f40160606e",
        b"\0": "8c1df14732580e5501b00f82b10a1647b40713191b7c1240ac80e2b68808ba69",
        b"TestContext": "5acb09211139c43b3090489a9da433e8a30ee7188ba8b0a9a1ccf0c229283e53",
    },
}
VECTORS = pytest.mark.parametrize("vector", [AES_VECTOR, CHACHA_VECTOR], ids=["A.1", "A.2"])
EACH_SUITE = pytest.mark.parametrize("suite", SUITES, ids=lambda suite: suite.name)

# Points of low order, RFC 7748 and Bernstein's list: with each the shared secret is zero.
LOW_ORDER = [
    "00" * 32,
    "01" + "00" * 31,
    "e0eb7a7c3b41b8ae1656e3faf19fc46ada098deb9c32b1fd866205165f49b800",
    "5f9c95bca3508c24b1d0b1559c83ef5b04445cc4581c8e86d8224eddd09f1157",
    "ecffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
    "edffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
    "eeffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
]


def of_hex(vector, *names):
    return [bytes.fromhex(vector[name]) for name in names]


def agreed(vector):
    private, public, ephemeral = of_hex(vector, "private", "public", "ephemeral")
    enc, sender = seal_to(public, INFO, vector["suite"], ephemeral=PrivateKey(ephemeral))
    return enc, sender, open_from(PrivateKey(private), enc, INFO, vector["suite"])


@VECTORS
def test_key_schedules_are_those_of_the_rfc(vector):
    private, public, ephemeral, enc = of_hex(vector, "private", "public", "ephemeral", "enc")
    assert PrivateKey(private).public == public
    assert PrivateKey(ephemeral).public == enc
    shared = hpke._shared_secret(PrivateKey(private).agree(enc), enc, public)
    assert shared.hex() == vector["shared"]
    schedule = hpke._key_schedule(shared, INFO, vector["suite"])
    expected = of_hex(vector, "key", "base_nonce", "exporter_secret")
    assert [schedule.key, schedule.base_nonce, schedule.exporter_secret] == expected


def test_nothing_that_is_printed_shows_a_secret():
    private = PrivateKey(bytes(range(32)))
    _, context = seal_to(private.public, INFO)
    schedule = context._schedule
    shown = "".join(map(repr, (private, context, schedule, vars(context))))
    for secret in (private.secret, schedule.key, schedule.base_nonce, schedule.exporter_secret):
        assert repr(secret) not in shown
        assert secret.hex() not in shown


@VECTORS
def test_messages_are_sealed_as_in_the_rfc(vector):
    enc, sender, receiver = agreed(vector)
    assert enc.hex() == vector["enc"]
    for number in range(257):
        associated = b"Count-%d" % number
        sealed = sender.seal(associated, PLAIN)
        if number in vector["sealed"]:
            assert sealed.hex() == vector["sealed"][number]
        assert receiver.open(associated, sealed) == PLAIN


@VECTORS
def test_both_sides_export_the_values_of_the_rfc(vector):
    _, sender, receiver = agreed(vector)
    for label, expected in vector["exported"].items():
        assert sender.export(label, 32).hex() == expected == receiver.export(label, 32).hex()


def other_suite(suite):
    return CipherSuite.new(KEMId.DHKEM_X25519_HKDF_SHA256, KDFId.HKDF_SHA256, AEADId(suite.aead_id))


@EACH_SUITE
@settings(max_examples=8, deadline=None)
@given(st.binary(max_size=80), st.binary(max_size=20), st.binary(max_size=200))
def test_pyhpke_opens_what_is_sealed_and_seals_what_is_opened(suite, info, associated, plain):
    own, other = PrivateKey.fresh(), other_suite(suite)
    enc, sender = seal_to(own.public, info, suite)
    theirs = KEMKey.from_pyca_cryptography_key(X25519PrivateKey.from_private_bytes(own.secret))
    receiver = other.create_recipient_context(enc, theirs, info=info)
    assert receiver.open(sender.seal(associated, plain), aad=associated) == plain
    assert receiver.export(b"x", 40) == sender.export(b"x", 40)
    public = KEMKey.from_pyca_cryptography_key(X25519PublicKey.from_public_bytes(own.public))
    enc, sealing = other.create_sender_context(public, info=info)
    context = open_from(own, enc, info, suite)
    assert context.open(associated, sealing.seal(plain, aad=associated)) == plain
    assert context.export(b"y", 99) == sealing.export(b"y", 99)


@EACH_SUITE
@settings(max_examples=8, deadline=None)
@given(st.binary(max_size=80), st.binary(max_size=200))
def test_the_cryptography_package_opens_what_is_sealed_and_the_other_way_round(suite, info, plain):
    aead = {1: reference.AEAD.AES_128_GCM, 3: reference.AEAD.CHACHA20_POLY1305}[suite.aead_id]
    other = reference.Suite(reference.KEM.X25519, reference.KDF.HKDF_SHA256, aead)
    own = PrivateKey.fresh()
    key = X25519PrivateKey.from_private_bytes(own.secret)
    enc, sender = seal_to(own.public, info, suite)
    assert other.decrypt(enc + sender.seal(b"", plain), key, info) == plain
    sealed = other.encrypt(plain, key.public_key(), info)
    assert open_from(own, sealed[:32], info, suite).open(b"", sealed[32:]) == plain


@EACH_SUITE
def test_every_flipped_bit_and_every_cut_is_refused(suite):
    own = PrivateKey.fresh()
    enc, sender = seal_to(own.public, b"info", suite)
    sealed = sender.seal(b"aad", b"two")
    context = open_from(own, enc, b"info", suite)
    for bit in range(8 * len(sealed)):
        changed = bytearray(sealed)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(MalformedError):
            context.open(b"aad", bytes(changed))
    for length in range(len(sealed)):
        with pytest.raises(MalformedError):
            context.open(b"aad", sealed[:length])
    assert context.open(b"aad", sealed) == b"two"  # a refused message does not count


@EACH_SUITE
def test_another_key_label_or_encapsulation_opens_nothing(suite):
    own = PrivateKey.fresh()
    enc, sender = seal_to(own.public, b"info", suite)
    sealed = sender.seal(b"aad", b"two")
    for private, given_enc, info, aad in [
        (PrivateKey.fresh(), enc, b"info", b"aad"),
        (own, PrivateKey.fresh().public, b"info", b"aad"),
        (own, enc, b"other", b"aad"),
        (own, enc, b"info", b"other"),
    ]:
        with pytest.raises(MalformedError):
            open_from(private, given_enc, info, suite).open(aad, sealed)


def test_messages_open_in_their_order_only():
    own = PrivateKey.fresh()
    enc, sender = seal_to(own.public, b"")
    first, second = sender.seal(b"", b"1"), sender.seal(b"", b"1")
    assert first != second
    context = open_from(own, enc, b"")
    with pytest.raises(MalformedError):
        context.open(b"", second)
    assert context.open(b"", first) == b"1"
    with pytest.raises(MalformedError):
        context.open(b"", first)


@pytest.mark.parametrize("point", LOW_ORDER)
def test_points_of_low_order_are_refused_by_both_sides(point):
    with pytest.raises(MalformedError, match="low order"):
        seal_to(bytes.fromhex(point), b"")
    with pytest.raises(MalformedError, match="low order"):
        open_from(PrivateKey.fresh(), bytes.fromhex(point), b"")


@pytest.mark.parametrize("length", [0, 31, 33, 64])
def test_keys_of_another_length_are_refused(length):
    with pytest.raises(MalformedError, match="32 bytes"):
        seal_to(bytes(length), b"")
    with pytest.raises(MalformedError, match="32 bytes"):
        open_from(PrivateKey.fresh(), bytes(length), b"")
    with pytest.raises(InputError, match="private key has the wrong length"):
        PrivateKey(bytes(length))


def test_a_context_works_in_one_direction():
    own = PrivateKey.fresh()
    enc, sender = seal_to(own.public, b"")
    with pytest.raises(InputError, match="wrong direction"):
        sender.open(b"", b"")
    with pytest.raises(InputError, match="wrong direction"):
        open_from(own, enc, b"").seal(b"", b"")


def test_no_longer_secret_is_derived_than_there_can_be():
    _, sender = seal_to(PrivateKey.fresh().public, b"")
    assert len(sender.export(b"", 255 * 32)) == 255 * 32
    for length in (-1, 255 * 32 + 1):
        with pytest.raises(InputError, match="cannot be derived"):
            sender.export(b"", length)


def test_suites_are_known_by_their_numbers():
    assert suite_of(0x20, 1, 1) is AES_128_GCM
    assert suite_of(0x20, 1, 3) is CHACHA20_POLY1305
    for numbers in [(0x10, 1, 1), (0x20, 2, 1), (0x20, 1, 2), (0x20, 1, 0xFFFF), (0, 0, 0)]:
        with pytest.raises(MalformedError, match="suite"):
            suite_of(*numbers)


def test_fresh_keys_differ_and_print_nothing():
    one, other = PrivateKey.fresh(), PrivateKey.fresh()
    assert one.public != other.public
    assert PrivateKey.fresh(Prg(bytes(16))) == PrivateKey.fresh(Prg(bytes(16)))
    _, context = seal_to(one.public, b"")
    for shown in (repr(one), repr(context), str(one)):
        assert one.secret.hex() not in shown
        assert repr(one.secret) not in shown
        assert "_schedule" not in shown
