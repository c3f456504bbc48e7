"""Key configurations: read exactly as the RFC writes them, or not at all."""

import pytest

from keyhole.crypto.hpke import AES_128_GCM, CHACHA20_POLY1305, PrivateKey
from keyhole.delivery.relay.ohttp import (
    GatewayKey,
    KeyConfig,
    decode_configs,
    decode_gateway_keys,
    encode_configs,
    encode_gateway_key,
)
from keyhole.errors import InputError, MalformedError

# RFC 9458, appendix A.
SECRET = "3c168975674b2fa8e465970b79c8dcf09f1c741626480bd4c6162fc5b6a98e1a"
ENCODED = bytes.fromhex(
    "01002031e1f05a740102115220e9af918f738674aec95f54db6e04eb705aae8e79815500080001000100010003"
)
LIST = b"\0\x2d" + ENCODED


def test_the_configuration_of_the_rfc_is_read_and_written():
    config = KeyConfig.decode(ENCODED)
    assert config.encode() == ENCODED
    assert config == GatewayKey(1, PrivateKey(bytes.fromhex(SECRET))).config
    assert config.algorithms == ((1, 1), (1, 3))
    assert config.suite is AES_128_GCM


def test_a_list_has_each_configuration_behind_its_length():
    first, second = KeyConfig.decode(ENCODED), GatewayKey.fresh(2).config
    assert encode_configs([first]) == LIST
    assert decode_configs(encode_configs([first, second])) == (first, second)


def test_every_cut_and_every_extension_of_a_list_is_refused():
    for length in range(len(LIST)):
        with pytest.raises(MalformedError):
            decode_configs(LIST[:length])
    for more in (b"\0", b"\0\0", b"\0\1x", LIST):  # the last one: the same number twice
        with pytest.raises(MalformedError):
            decode_configs(LIST + more)


def test_a_bad_entry_discards_the_whole_list():
    bad = ENCODED[:-1]
    with pytest.raises(MalformedError):
        decode_configs(LIST + len(bad).to_bytes(2, "big") + bad)


def test_keys_of_other_agreements_are_passed_over():
    other = b"\x07\x00\x10" + bytes(65) + b"\0\4\0\1\0\1"
    listed = len(other).to_bytes(2, "big") + other
    assert decode_configs(listed + LIST) == (KeyConfig.decode(ENCODED),)
    with pytest.raises(MalformedError):
        decode_configs(listed)
    with pytest.raises(MalformedError, match="kem 0x0010"):
        KeyConfig.decode(other)


def test_the_first_known_cipher_of_the_gateway_is_used():
    public = KeyConfig.decode(ENCODED).public
    assert KeyConfig(1, public, ((1, 2), (1, 3), (1, 1))).suite is CHACHA20_POLY1305
    with pytest.raises(MalformedError, match="no cipher"):
        _ = KeyConfig(1, public, ((1, 2), (2, 1))).suite


@pytest.mark.parametrize(
    "at_and_byte", [(36, 0x09), (36, 0x07), (36, 0x04), (35, 0x01), (1, 0x01), (2, 0x21)]
)
def test_lengths_and_agreements_that_do_not_fit_are_refused(at_and_byte):
    place, byte = at_and_byte
    changed = bytearray(ENCODED)
    changed[place] = byte
    with pytest.raises(MalformedError):
        KeyConfig.decode(bytes(changed))


@pytest.mark.parametrize("facts", [(-1, bytes(32)), (256, bytes(32)), (1, bytes(31))])
def test_impossible_configurations_cannot_be_made(facts):
    with pytest.raises(MalformedError):
        KeyConfig(*facts)


def test_a_key_file_holds_keys_by_number():
    one, two = GatewayKey.fresh(1), GatewayKey.fresh(200)
    assert decode_gateway_keys(encode_gateway_key(two) + "\n" + encode_gateway_key(one)) == (
        two,
        one,
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\n",
        SECRET,
        f"1 {SECRET[:-2]}",
        f"1 {SECRET} {SECRET}",
        f"256 {SECRET}",
        f"-1 {SECRET}",
        f"x {SECRET}",
        f"1 {'zz' * 32}",
        f"1 {SECRET}\n1 {SECRET}",
    ],
)
def test_other_key_files_are_refused_without_showing_a_secret(text):
    with pytest.raises(InputError) as refused:
        decode_gateway_keys(text)
    assert SECRET[:16] not in str(refused.value)


def test_printing_a_gateway_key_shows_its_number():
    key = GatewayKey.fresh(9)
    assert repr(key) == "GatewayKey(9, ...)"
