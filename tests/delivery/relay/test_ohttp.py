"""Oblivious HTTP: appendix A of RFC 9458 byte for byte; whatever is changed does not open."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keyhole.crypto.hpke import AES_128_GCM, CHACHA20_POLY1305, PrivateKey, expand, extract
from keyhole.delivery.relay import ohttp
from keyhole.delivery.relay.ohttp import (
    REQUEST_OVERHEAD,
    GatewayKey,
    KeyConfig,
    open_request,
    open_response,
    response_overhead,
    seal_request,
    seal_response,
)
from keyhole.errors import MalformedError

# RFC 9458, appendix A.
PRIVATE = PrivateKey(
    bytes.fromhex("3c168975674b2fa8e465970b79c8dcf09f1c741626480bd4c6162fc5b6a98e1a")
)
CONFIG = KeyConfig.decode(
    bytes.fromhex(
        "01002031e1f05a740102115220e9af918f738674aec95f54db6e04eb705aae8e79815500080001000100010003"
    )
)
REQUEST = bytes.fromhex("00034745540568747470730b6578616d706c652e636f6d012f")
EPHEMERAL = PrivateKey(
    bytes.fromhex("bc51d5e930bda26589890ac7032f70ad12e4ecb37abb1b65b1256c9c48999c73")
)
ENC = bytes.fromhex("4b28f881333e7c164ffc499ad9796f877f4e1051ee6d31bad19dec96c208b472")
INFO = bytes.fromhex("6d6573736167652f626874747020726571756573740001002000010001")
SEALED_REQUEST = bytes.fromhex(
    "010020000100014b28f881333e7c164ffc499ad9796f877f4e1051ee6d31bad1"
    "9dec96c208b4726374e469135906992e1268c594d2a10c695d858c40a026e796"
    "5e7d86b83dd440b2c0185204b4d63525"
)
RESPONSE = bytes.fromhex("0140c8")
SECRET = bytes.fromhex("62d87a6ba569ee81014c2641f52bea36")
RESPONSE_NONCE = bytes.fromhex("c789e7151fcba46158ca84b04464910d")
PSEUDORANDOM_KEY = "979aaeae066cf211ab407b31ae49767f344e1501e475c84e8aff547cc5a683db"
ANSWER_KEY = "5d0172a080e428b16d298c4ea0db620d"
ANSWER_NONCE = "f6bf1aeb88d6df87007fa263"
SEALED_RESPONSE = bytes.fromhex(
    "c789e7151fcba46158ca84b04464910d86f9013e404feea014e7be4a441f234f857fbd"
)
KEYS = {1: PRIVATE}


def test_the_request_of_the_rfc_is_sealed_and_opened():
    assert EPHEMERAL.public == ENC
    assert ohttp._info(SEALED_REQUEST[:7]) == INFO
    sealed, exchange = seal_request(CONFIG, REQUEST, ephemeral=EPHEMERAL)
    assert sealed == SEALED_REQUEST
    assert exchange.enc == ENC
    assert open_request(KEYS, SEALED_REQUEST)[0] == REQUEST


def test_the_response_of_the_rfc_is_sealed_and_opened():
    _, client = seal_request(CONFIG, REQUEST, ephemeral=EPHEMERAL)
    _, gateway = open_request(KEYS, SEALED_REQUEST)
    assert gateway.context.export(b"message/bhttp response", 16) == SECRET
    key = extract(ENC + RESPONSE_NONCE, SECRET)
    assert key.hex() == PSEUDORANDOM_KEY
    assert expand(key, b"key", 16).hex() == ANSWER_KEY
    assert expand(key, b"nonce", 12).hex() == ANSWER_NONCE
    assert ohttp._seal_with_nonce(gateway, RESPONSE, RESPONSE_NONCE) == SEALED_RESPONSE
    assert open_response(client, SEALED_RESPONSE) == RESPONSE


@pytest.mark.parametrize("suite", [AES_128_GCM, CHACHA20_POLY1305], ids=lambda suite: suite.name)
@settings(max_examples=10, deadline=None)
@given(st.binary(max_size=100), st.binary(max_size=100))
def test_any_message_comes_back_under_either_cipher(suite, request, response):
    config = KeyConfig(1, PRIVATE.public, ((1, suite.aead_id),))
    sealed, client = seal_request(config, request)
    assert len(sealed) == len(request) + REQUEST_OVERHEAD
    plain, gateway = open_request(KEYS, sealed)
    assert plain == request
    answer = seal_response(gateway, response)
    assert len(answer) == len(response) + response_overhead(suite)
    assert open_response(client, answer) == response


def test_every_flipped_bit_of_a_request_is_refused():
    for bit in range(8 * len(SEALED_REQUEST)):
        changed = bytearray(SEALED_REQUEST)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(MalformedError):
            open_request(KEYS, bytes(changed))


def test_every_cut_and_extended_request_is_refused():
    for length in range(len(SEALED_REQUEST)):
        with pytest.raises(MalformedError):
            open_request(KEYS, SEALED_REQUEST[:length])
    with pytest.raises(MalformedError):
        open_request(KEYS, SEALED_REQUEST + b"\0")


def test_every_flipped_bit_and_every_cut_of_a_response_is_refused():
    _, client = seal_request(CONFIG, REQUEST, ephemeral=EPHEMERAL)
    for bit in range(8 * len(SEALED_RESPONSE)):
        changed = bytearray(SEALED_RESPONSE)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(MalformedError):
            open_response(client, bytes(changed))
    for length in range(len(SEALED_RESPONSE)):
        with pytest.raises(MalformedError):
            open_response(client, SEALED_RESPONSE[:length])


def test_whatever_keeps_a_request_from_opening_it_is_refused_alike():
    foreign = seal_request(GatewayKey.fresh(1).config, REQUEST)[0]
    unknown = seal_request(KeyConfig(2, PRIVATE.public), REQUEST)[0]
    suite = bytes.fromhex("01002000010002") + SEALED_REQUEST[7:]
    zeros = SEALED_REQUEST[:7] + bytes(32) + SEALED_REQUEST[39:]
    flipped = SEALED_REQUEST[:-1] + b"\0"
    words = set()
    for sealed in (foreign, unknown, suite, zeros, flipped):
        with pytest.raises(MalformedError) as refused:
            open_request(KEYS, sealed)
        words.add(str(refused.value))
    assert len(words) == 1


@pytest.mark.parametrize("head", ["01001000010001", "01002000020001", "01002000010002"])
def test_other_suites_are_refused(head):
    with pytest.raises(MalformedError):
        open_request(KEYS, bytes.fromhex(head) + SEALED_REQUEST[7:])


def test_a_point_of_zeros_is_refused_by_client_and_gateway():
    with pytest.raises(MalformedError):
        open_request(KEYS, SEALED_REQUEST[:7] + bytes(32) + SEALED_REQUEST[39:])
    with pytest.raises(MalformedError):
        seal_request(KeyConfig(1, bytes(32)), REQUEST)


def test_an_answer_opens_for_its_own_request_only():
    one, two = (seal_request(CONFIG, REQUEST) for _ in range(2))
    assert one[0] != two[0]
    answer = seal_response(open_request(KEYS, one[0])[1], RESPONSE)
    with pytest.raises(MalformedError):
        open_response(two[1], answer)
    assert open_response(one[1], answer) == RESPONSE


def test_two_answers_to_one_request_have_nothing_in_common():
    _, gateway = open_request(KEYS, SEALED_REQUEST)
    one, two = (seal_response(gateway, RESPONSE) for _ in range(2))
    assert one[:16] != two[:16]
    assert one[16:] != two[16:]
