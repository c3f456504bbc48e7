"""Binary HTTP: the RFC's examples, any message there and back, and nothing invalid in between."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keyhole.crypto.codec import Reader, encode_varint, prefixed
from keyhole.delivery.relay.binary_http import (
    BinaryRequest,
    BinaryResponse,
    Informational,
    decode_request,
    decode_response,
    encode_request,
    encode_response,
)
from keyhole.errors import InputError, MalformedError

# RFC 9292, section 5: figures 8, 9, 11 and 13.
KNOWN_REQUEST = bytes.fromhex(
    "0003474554056874747073000a2f68656c6c6f2e747874406c0a757365722d61"
    "67656e74346375726c2f372e31362e33206c69626375726c2f372e31362e3320"
    "4f70656e53534c2f302e392e376c207a6c69622f312e322e3304686f73740f77"
    "77772e6578616d706c652e636f6d0f6163636570742d6c616e67756167650665"
    "6e2c206d690000"
)
OPEN_REQUEST = bytes.fromhex(
    "0203474554056874747073000a2f68656c6c6f2e7478740a757365722d616765"
    "6e74346375726c2f372e31362e33206c69626375726c2f372e31362e33204f70"
    "656e53534c2f302e392e376c207a6c69622f312e322e3304686f73740f777777"
    "2e6578616d706c652e636f6d0f6163636570742d6c616e677561676506656e2c"
    "206d6900000000000000000000000000"
)
OPEN_RESPONSE = bytes.fromhex(
    "0340660772756e6e696e670a22736c65657020313522004067046c696e6b233c"
    "2f7374796c652e6373733e3b2072656c3d7072656c6f61643b2061733d737479"
    "6c65046c696e6b243c2f7363726970742e6a733e3b2072656c3d7072656c6f61"
    "643b2061733d7363726970740040c804646174651d4d6f6e2c203237204a756c"
    "20323030392031323a32383a353320474d540673657276657206417061636865"
    "0d6c6173742d6d6f6469666965641d5765642c203232204a756c203230303920"
    "31393a31353a353620474d5404657461671422333461613338372d642d313536"
    "3865623030220d6163636570742d72616e6765730562797465730e636f6e7465"
    "6e742d6c656e67746802353104766172790f4163636570742d456e636f64696e"
    "670c636f6e74656e742d747970650a746578742f706c61696e003348656c6c6f"
    "20576f726c6421204d7920636f6e74656e7420696e636c756465732061207472"
    "61696c696e672043524c462e0d0a0000"
)
KNOWN_RESPONSE = bytes.fromhex(
    "0140c8001d5468697320636f6e74656e7420636f6e7461696e732043524c462e"
    "0d0a0d07747261696c65720474657874"
)
HELLO = BinaryRequest(
    b"GET",
    b"/hello.txt",
    fields=(
        (b"user-agent", b"curl/7.16.3 libcurl/7.16.3 OpenSSL/0.9.7l zlib/1.2.3"),
        (b"host", b"www.example.com"),
        (b"accept-language", b"en, mi"),
    ),
)
CHUNKED = BinaryResponse(200, (), b"This content contains CRLF.\r\n", ((b"trailer", b"text"),))


def test_requests_of_the_rfc_are_read_in_both_forms():
    assert decode_request(KNOWN_REQUEST) == HELLO == decode_request(OPEN_REQUEST)


def test_a_request_of_the_rfc_is_written_byte_for_byte():
    # The RFC writes the two empty sections at the end, which padding is equal to.
    assert encode_request(HELLO, len(KNOWN_REQUEST)) == KNOWN_REQUEST
    assert encode_request(HELLO) == KNOWN_REQUEST[:-2]


def test_a_response_with_interim_ones_is_read():
    response = decode_response(OPEN_RESPONSE)
    assert response.informational == (
        Informational(102, ((b"running", b'"sleep 15"'),)),
        Informational(
            103,
            (
                (b"link", b"</style.css>; rel=preload; as=style"),
                (b"link", b"</script.js>; rel=preload; as=script"),
            ),
        ),
    )
    assert response.status == 200
    assert dict(response.fields)[b"etag"] == b'"34aa387-d-1568eb00"'
    assert len(response.fields) == 8
    assert response.content == b"Hello World! My content includes a trailing CRLF.\r\n"
    assert decode_response(encode_response(response)) == response


def test_a_response_with_a_trailer_is_read_and_written():
    assert decode_response(KNOWN_RESPONSE) == CHUNKED
    assert encode_response(CHUNKED) == KNOWN_RESPONSE


def test_empty_sections_at_the_end_may_be_missing():
    # Two of the known form; ten of padding and the two of the open one.
    for data, limit in [(KNOWN_REQUEST, 2), (OPEN_REQUEST, 12)]:
        for cut in range(1, limit + 1):
            assert decode_request(data[:-cut]) == HELLO
        with pytest.raises(MalformedError):
            decode_request(data[: -limit - 1])


def test_a_message_that_is_cut_anywhere_else_is_refused():
    request, response = KNOWN_REQUEST, KNOWN_RESPONSE
    good = [n for n in range(len(request)) if _decodes(decode_request, request[:n])]
    # Behind the control data, the header, and the empty content.
    assert good == [23, len(request) - 2, len(request) - 1]
    good = [n for n in range(len(response)) if _decodes(decode_response, response[:n])]
    # Behind the status, the empty header, and the content: where sections begin (section 3.8).
    assert good == [3, 4, 34]


def _decodes(decode, data):
    try:
        decode(data)
    except MalformedError:
        return False
    return True


def test_padding_is_zeros_and_nothing_else():
    padded = encode_response(CHUNKED, 100)
    assert len(padded) == 100
    assert decode_response(padded) == CHUNKED
    for place in range(len(KNOWN_RESPONSE), 100):
        dirty = bytearray(padded)
        dirty[place] = 1
        with pytest.raises(MalformedError):
            decode_response(bytes(dirty))
    with pytest.raises(InputError, match="longer"):
        encode_response(CHUNKED, len(KNOWN_RESPONSE) - 1)


def test_numbers_have_the_lengths_of_rfc_9000():
    for number, data in [
        (0, "00"),
        (63, "3f"),
        (64, "4040"),
        (16_383, "7fff"),
        (16_384, "80004000"),
        (2**30 - 1, "bfffffff"),
        (2**30, "c000000040000000"),
        (2**62 - 1, "ffffffffffffffff"),
    ]:
        assert encode_varint(number).hex() == data
        assert Reader(bytes.fromhex(data)).varint() == number
    assert Reader(bytes.fromhex("4025")).varint() == 37  # longer than needed, and allowed
    for number in (-1, 2**62):
        with pytest.raises(MalformedError):
            encode_varint(number)


NAMES = st.from_regex(rb"[!#$%&'*+.^_`|~0-9a-z-]{1,12}", fullmatch=True)
VALUES = st.binary(max_size=20).map(
    lambda raw: bytes(b for b in raw if b not in b"\0\r\n").strip(b" \t")
)
FIELDS = st.lists(st.tuples(NAMES, VALUES), max_size=4).map(tuple)
VISIBLE = st.from_regex(rb"[!-~]{1,20}", fullmatch=True)
REQUESTS = st.builds(
    BinaryRequest,
    method=NAMES.map(bytes.upper),
    path=VISIBLE,
    scheme=st.sampled_from([b"http", b"https"]),
    authority=VISIBLE,
    fields=FIELDS,
    content=st.binary(max_size=80),
    trailers=FIELDS,
)
RESPONSES = st.builds(
    BinaryResponse,
    status=st.integers(200, 599),
    fields=FIELDS,
    content=st.binary(max_size=80),
    trailers=FIELDS,
    informational=st.lists(
        st.builds(Informational, status=st.integers(100, 199), fields=FIELDS), max_size=3
    ).map(tuple),
)


@settings(max_examples=40)
@given(REQUESTS, st.integers(0, 40))
def test_any_request_comes_back_whatever_its_padding(request, padding):
    plain = encode_request(request)
    assert decode_request(encode_request(request, len(plain) + padding)) == request


@settings(max_examples=40)
@given(RESPONSES, st.integers(0, 40))
def test_any_response_comes_back_whatever_its_padding(response, padding):
    plain = encode_response(response)
    assert decode_response(encode_response(response, len(plain) + padding)) == response


@given(st.binary(max_size=60), st.sampled_from([0, 1, 2, 3]))
def test_any_bytes_are_read_or_refused(data, framing):
    for decode in (decode_request, decode_response):
        for given_bytes in (data, bytes([framing]) + data):
            _decodes(decode, given_bytes)


@given(st.sampled_from([KNOWN_REQUEST, OPEN_REQUEST, OPEN_RESPONSE, KNOWN_RESPONSE]), st.data())
def test_a_changed_byte_is_read_or_refused(data, draw):
    changed = bytearray(data)
    changed[draw.draw(st.integers(0, len(data) - 1))] = draw.draw(st.integers(0, 255))
    _decodes(decode_request, bytes(changed))
    _decodes(decode_response, bytes(changed))


def raw_request(*fields, method=b"GET", path=b"/x", scheme=b"https", trailers=()):
    control = b"".join(map(prefixed, (method, scheme, b"", path)))
    section = prefixed(b"".join(prefixed(part) for line in fields for part in line))
    last = prefixed(b"".join(prefixed(part) for line in trailers for part in line))
    return b"\0" + control + section + b"\0" + last


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\4",
        b"\1" + KNOWN_REQUEST[1:],
        raw_request((b"", b"x")),
        raw_request((b"bad name", b"x")),
        raw_request((b"x", b"a\r\nb: c")),
        raw_request((b"x", b"a\0b")),
        raw_request((b"x", b" a")),
        raw_request((b"x", b"a\t")),
        raw_request((b":method", b"POST")),
        raw_request((b":path", b"/y")),
        raw_request((b"x", b"y"), (b":protocol", b"z")),
        raw_request(trailers=[(b":protocol", b"z")]),
        raw_request(method=b"GE T"),
        raw_request(method=b""),
        raw_request(path=b""),
        raw_request(path=b"/a b"),
        raw_request(path=b"/\xc3\xa9"),
        raw_request(scheme=b""),
        raw_request(*[(b"x", b"y")] * 257),
        b"\0" + prefixed(b"GET") + b"\xff" * 8,
        b"\2" + b"".join(map(prefixed, (b"GET", b"https", b"", b"/"))) + b"\1x\1y",
    ],
)
def test_invalid_requests_are_refused(data):
    with pytest.raises(MalformedError):
        decode_request(data)


def test_what_is_valid_though_rare_is_read():
    assert decode_request(raw_request((b":protocol", b"z"), (b"x", b""))).fields[0][1] == b"z"
    assert decode_request(raw_request((b"Accept", b"*/*"))).fields == ((b"accept", b"*/*"),)
    assert decode_request(raw_request(method=b"CONNECT", path=b"", scheme=b"")).path == b""
    assert decode_request(b"\x40\x00" + KNOWN_REQUEST[1:]) == HELLO


@pytest.mark.parametrize("status", [0, 99, 199, 600, 16_383])
def test_a_response_ends_with_a_final_status(status):
    with pytest.raises(MalformedError):
        decode_response(b"\1" + encode_varint(status))
    with pytest.raises(MalformedError):
        BinaryResponse(status)


def test_interim_responses_are_limited():
    with pytest.raises(MalformedError):
        decode_response(b"\1" + (encode_varint(102) + b"\0") * 17 + encode_varint(200))
    with pytest.raises(MalformedError):
        Informational(200)


def test_printing_a_message_shows_nothing_of_it():
    assert "hello" not in repr(HELLO)
    assert "CRLF" not in repr(CHUNKED)
