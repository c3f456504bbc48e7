"""The gateway: answers once, refuses alike, and pads what it says."""

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keyhole.crypto.once import ReplayWindow
from keyhole.crypto.prg import Prg
from keyhole.delivery.exchange import mix
from keyhole.delivery.relay.binary_http import (
    BinaryRequest,
    BinaryResponse,
    decode_response,
    encode_request,
)
from keyhole.delivery.relay.gateway import ERROR_BYTES, PROBLEM, Gateway, Reply, refusal, relay
from keyhole.delivery.relay.ohttp import (
    GatewayKey,
    KeyConfig,
    open_response,
    response_overhead,
    seal_request,
)
from keyhole.errors import InputError, MalformedError, NotFoundError, ServiceError

KEY = GatewayKey.fresh(1)
GOOD = BinaryRequest(b"GET", b"/a")


def echo(request):
    return Reply(BinaryResponse(200, (), request.path), 64)


def gateway(handler=echo, **options):
    return Gateway([KEY], handler, **options)


def ask(served, plain, config=None):
    """The response to a request in plain bytes, and the length of the sealed answer."""
    config = config or served.configs[0]
    sealed, exchange = seal_request(config, plain)
    answer = served.answer(sealed)
    return decode_response(open_response(exchange, answer)), len(answer)


def facts_of(response):
    return json.loads(response.content)["error"]


def test_answers_are_padded_to_the_length_that_the_handler_names():
    served = gateway()
    for path in (b"/a", b"/" + b"a" * 40):
        response, length = ask(served, encode_request(BinaryRequest(b"GET", path)))
        assert response.content == path
        assert length == 64 + response_overhead(KEY.config.suite)


def test_what_a_handler_refuses_is_told_to_the_client_alone():
    def refuse(_):
        raise NotFoundError("no such thing: got x; expected y; z")

    response, length = ask(gateway(refuse), encode_request(GOOD))
    assert response.status == 404
    assert facts_of(response) == {
        "status": 404,
        "kind": "NotFoundError",
        "wrong": "no such thing",
        "got": "x",
        "allowed": "y",
        "fix": "z",
    }
    assert length == ERROR_BYTES + response_overhead(KEY.config.suite)


def test_a_refusal_that_does_not_fit_keeps_its_status():
    got = "x" * 600
    error = NotFoundError(f"no such thing: got {got}; expected y; z")
    response, length = ask(gateway(lambda _: refusal(error, 10)), encode_request(GOOD))
    assert (response.status, response.content) == (404, b"")
    assert length == 10 + response_overhead(KEY.config.suite)


@pytest.mark.parametrize(
    "plain",
    [
        b"",
        b"\7",
        encode_request(GOOD)[:-1],
        b"\0" * 30,
        encode_request(BinaryRequest(b"GET", b"/a", fields=((b"expect", b"100-continue"),))),
    ],
)
def test_a_request_that_opens_and_makes_no_sense_is_refused_inside(plain):
    response, _ = ask(gateway(), plain)
    assert response.status == 400
    assert facts_of(response)["kind"] == "MalformedError"


def test_a_replayed_request_is_refused_inside_and_not_handled_again():
    handled = []

    def count(request):
        handled.append(request)
        return echo(request)

    served = gateway(count)
    sealed, exchange = seal_request(KEY.config, encode_request(GOOD))
    first, second = served.answer(sealed), served.answer(sealed)
    assert decode_response(open_response(exchange, first)).status == 200
    refused = decode_response(open_response(exchange, second))
    assert refused.status == 400
    assert facts_of(refused)["kind"] == "ReplayError"
    assert len(handled) == 1


def test_the_window_is_bounded_and_forgets_the_oldest():
    window = ReplayWindow(limit=2)
    for name in (b"a", b"b", b"c"):
        window.admit(name)
    assert len(window) == 2
    window.admit(b"a")
    with pytest.raises(InputError, match="before"):
        window.admit(b"c")
    with pytest.raises(InputError, match="nothing"):
        ReplayWindow(0)


def test_what_does_not_open_takes_no_place_in_the_window():
    window = ReplayWindow()
    served = gateway(window=window)
    for _ in range(3):
        with pytest.raises(MalformedError):
            served.answer(seal_request(GatewayKey.fresh(1).config, b"")[0])
    assert len(window) == 0


def test_requests_that_do_not_open_are_answered_with_nothing_and_the_others_with_theirs():
    served = gateway()
    good, exchange = seal_request(KEY.config, encode_request(GOOD))
    bad = [b"", good[:-1], good[:10] + b"\0" + good[11:], bytes(len(good))]
    answers = served.answer_many([*bad, good])
    assert answers[:-1] == [b""] * len(bad)
    assert decode_response(open_response(exchange, answers[-1])).content == b"/a"


def test_older_keys_still_open_and_unknown_ones_do_not():
    old, new = GatewayKey.fresh(1), GatewayKey.fresh(2)
    served = Gateway([new, old], echo)
    assert served.configs == (new.config, old.config)
    for key in (old, new):
        assert ask(served, encode_request(GOOD), key.config)[0].status == 200
    with pytest.raises(MalformedError):
        ask(served, encode_request(GOOD), KeyConfig(3, new.private.public))


def test_a_gateway_has_keys_of_different_numbers():
    for keys in ([], [GatewayKey.fresh(1), GatewayKey.fresh(1)]):
        with pytest.raises(InputError, match="keys of a gateway"):
            Gateway(keys, echo)


def test_the_problem_is_the_one_of_the_registry():
    kind = "https://iana.org/assignments/http-problem-types#ohttp-key"
    assert json.loads(PROBLEM) == {"type": kind, "title": "the request cannot be opened"}


def test_a_relay_mixes_what_it_forwards_and_gives_everybody_their_own():
    seen = []

    def forward(sealed):
        seen.extend(sealed)
        return [b"to " + one for one in sealed]

    batches = [[b"%d-%d" % (client, n) for n in range(20)] for client in range(3)]
    answers = relay(batches, forward, Prg(bytes(16)))
    assert answers == [[b"to " + one for one in batch] for batch in batches]
    flat = [one for batch in batches for one in batch]
    assert sorted(seen) == sorted(flat)
    assert seen != flat
    runs = [one.split(b"-")[0] for one in seen]
    changes = sum(a != b for a, b in pairwise(runs))
    assert changes > 20  # three clients one after the other would give 2


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 5), max_size=6))
def test_what_is_mixed_finds_its_way_back(counts):
    batches = [
        [b"%d-%d" % (client, n) for n in range(count)] for client, count in enumerate(counts)
    ]
    mixed = mix(batches, Prg(bytes(16)))
    assert sorted(mixed.requests) == sorted(one for batch in batches for one in batch)
    assert mixed.hand_back(mixed.requests) == batches
    assert repr(mixed) == f"Mixed({sum(counts)} requests of {len(counts)} clients)"


def test_a_relay_refuses_a_gateway_that_drops_answers():
    with pytest.raises(ServiceError, match="1 answers"):
        relay([[b"a"], [b"b"]], lambda sealed: sealed[1:])
