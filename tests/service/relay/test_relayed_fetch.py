"""A device behind a relay: the same model, no trace of it at the gateway, and no way round."""

from dataclasses import replace

import pytest

import keyhole as kh
from keyhole.crypto.hpke import PrivateKey
from keyhole.delivery.relay.ohttp import GatewayKey, encode_configs
from keyhole.errors import InputError, KeySpaceError, ServiceError, TooLateError
from keyhole.service import gateway as gateways
from keyhole.service.relay import Mix, RelayApp
from keyhole.service.transport import serving
from tests.helpers import LAYOUTS, assert_trees_equal, zeros
from tests.service.recorder import Recorder
from tests.service.relay.relayed import SETTINGS, line_to, relayed
from tests.service.scripted import answer, scripted

KEYS = {"word": [6, 1, 6], "neuron": [5]}


@pytest.fixture
def both(tmp_path):
    with relayed(tmp_path) as made:
        made.state, made.round = made.publish()
        yield made


def slice_requests(recorder):
    """What arrived that could tell a key: everything that names slices, or asks for some."""
    return [(method, path) for method, path, *_ in recorder.seen if "slices" in path]


@pytest.mark.parametrize(
    "keys", [KEYS, {"word": [], "neuron": []}, {"word": [0, 7, 3, 5], "neuron": [0, 1, 2]}], ids=str
)
def test_a_relayed_model_is_the_plain_one(both, keys):
    device = both.device()
    found = both.fetch()(device, both.round, keys)
    assert_trees_equal(found.model, device.fetch(both.round, keys).model)
    assert {name: list(z.array) for name, z in found.keys.items()} == keys


@pytest.mark.parametrize(
    "name", ["rows", "rows with a broadcast bias", "one parameter cut twice", "nothing cut"]
)
def test_every_kind_of_cut_can_be_relayed(tmp_path, name):
    layout = LAYOUTS[name]
    spaces = {space.name: min(2, space.num_keys) for space in layout.spaces}
    with relayed(tmp_path) as both:
        _, round_id = both.publish(layout=layout, settings={"keys_per_client": spaces})
        device = both.device()
        keys = {space: list(range(count))[::-1] for space, count in spaces.items()}
        found = both.fetch()(device, round_id, keys)
        assert_trees_equal(found.model, device.fetch(round_id, keys).model)


def test_the_gateway_is_asked_for_no_slice_directly_but_for_what_everyone_gets(both):
    device = both.device()
    both.fetch()(device, both.round, KEYS)
    direct = [path for method, path, *_ in both.gateway.seen if path != "/v1/gateway"]
    everyone = f"/v1/rounds/{both.round}/slices"
    expected = [f"/v1/rounds/{both.round}/manifest", "/v1/gateway/keys", "/v1/gateway/keys"]
    expected += [f"/v1/rounds/{both.round}/tables/{table}/top" for table in (1, 2)]
    assert sorted(direct) == sorted([*expected, everyone])
    # The one plain query is for table 0, which is everyone's: key 0 of one.
    (query,) = both.gateway.bodies(everyone)
    assert both.gateway.bodies("/v1/gateway")
    other = Recorder(both.service.app)
    with serving(other) as url:
        both.fetch()(both.device(url), both.round, {"word": [], "neuron": []})
    assert other.bodies(everyone) == [query]  # whatever the keys are


@pytest.mark.parametrize("keys", [KEYS, {"word": [], "neuron": []}, {"word": [7], "neuron": [0]}])
def test_what_the_relay_sees_does_not_depend_on_keys(both, keys):
    device = both.device()
    traffic = both.fetch()(device, both.round, keys).traffic
    shown = [(method, path, len(body)) for method, path, _, body, _ in both.relay.seen]
    requests = 4 + 3  # as the settings of the round say
    request_bytes = len(f"/v1/rounds/{both.round}/tables/1/slices/0") + 14 + 55
    assert shown == [
        ("GET", "/v1/relay/keys", 0),
        ("POST", "/v1/relay", 8 + requests * request_bytes),
    ]
    assert traffic.requests == 4  # everyone's part, two tops, one body of sealed requests
    assert traffic.bytes_down == _bytes_down(both, device)


def _bytes_down(both, device):
    """Answers of two tables and everyone's part, by their public lengths."""
    tables = device.known(both.round).manifest.tables
    cut = [(t, SETTINGS["keys_per_client"][t.name]) for t in tables if t.factors]
    replies = sum(count * (table.record_bytes + 5 + 32 + 4) for table, count in cut)
    tops = sum(32 * table.num_keys for table, _ in cut)
    return 8 + replies + tops + sum(t.record_bytes for t in tables if not t.factors)


def test_a_relay_that_is_away_is_an_error_and_nothing_is_asked_directly(both):
    device = both.device()
    device.known(both.round)
    pinned = encode_configs([both.key.config])
    fetch = both.fetch("http://127.0.0.1:9", pinned=pinned)
    before = len(both.gateway.seen)
    with pytest.raises(ServiceError):
        fetch(device, both.round, KEYS)
    assert all(path.endswith("/top") for _, path, *_ in both.gateway.seen[before:])


@pytest.mark.parametrize(
    "told",
    [answer(404), answer(403), answer(413), answer(500), answer(503), answer(200, b"x"), None],
)
def test_a_relay_that_refuses_or_makes_no_sense_is_an_error(both, told):
    device = both.device()
    device.known(both.round)
    before = len(both.gateway.seen)
    with scripted(*[told] * 3) as script:
        url = f"http://127.0.0.1:{script.port}"
        fetch = both.fetch(url, pinned=encode_configs([both.key.config]))
        with pytest.raises(ServiceError):
            fetch(device, both.round, KEYS)
    assert all(path.endswith("/top") for _, path, *_ in both.gateway.seen[before:])


def test_no_sealed_request_is_ever_sent_twice(both):
    device = both.device()
    with scripted(answer(503), None, answer(200, b"x")) as script:
        url = f"http://127.0.0.1:{script.port}"
        fetch = both.fetch(url, pinned=encode_configs([both.key.config]))
        with pytest.raises(ServiceError):
            fetch(device, both.round, KEYS)
        bodies = [body for _, _, body in script.asked]
    assert len(bodies) == 3
    encs = [body[at + 7 : at + 39] for body in bodies for at in range(8, len(body), _each(body))]
    assert len(set(encs)) == len(encs) == 3 * 7


def _each(body):
    return int.from_bytes(body[4:8], "little")


def test_a_gateway_that_comes_back_is_asked_anew(both):
    """The relay cannot reach the gateway at first; the device tries again and succeeds."""
    calls = []
    line = line_to(both.stack, both.service.url)
    forward = line.forward

    async def fail_once(sealed):
        calls.append(len(sealed))
        if len(calls) == 1:
            raise ServiceError("away: got x; expected y; z")
        return await forward(sealed)

    line.forward = fail_once
    with serving(RelayApp(line, mix=Mix(0.0))) as url:
        device = both.device()
        found = both.fetch(url)(device, both.round, KEYS)
    assert_trees_equal(found.model, device.fetch(both.round, KEYS).model)
    assert calls == [7, 7]


def test_two_sources_that_differ_are_not_believed(both):
    device = both.device()
    other = encode_configs([GatewayKey.fresh(1).config])
    with scripted(answer(200, other)) as script:
        fetch = both.fetch(f"http://127.0.0.1:{script.port}")
        with pytest.raises(ServiceError, match="another from the gateway"):
            fetch(device, both.round, KEYS)
    assert not both.gateway.bodies("/v1/gateway")


def test_a_pinned_configuration_asks_nobody(both):
    device = both.device()
    fetch = both.fetch(pinned=encode_configs([both.key.config]))
    fetch(device, both.round, KEYS)
    paths = [path for _, path, *_ in both.gateway.seen + both.relay.seen]
    assert not [path for path in paths if "keys" in path]


def test_a_pinned_configuration_of_another_key_finds_nothing_and_tells_the_gateway_nothing(both):
    """A gateway can leave any request unopened that it likes: a device that failed would show it
    whose requests those were."""
    device = both.device()
    wrong = replace(both.key.config, public=PrivateKey.fresh().public)
    found = both.fetch(pinned=encode_configs([wrong]))(device, both.round, KEYS)
    assert not any(map(len, found.keys.values()))
    assert found.wrong == sum(map(len, KEYS.values()))
    with pytest.raises(ServiceError, match="none that can be used"):
        both.fetch(pinned=b"nonsense")(device, both.round, KEYS)
    everyone = f"/v1/rounds/{both.round}/slices"
    assert slice_requests(both.gateway) == [("POST", everyone)]


def test_the_key_configuration_is_fetched_for_every_round(both):
    """Whatever became of the last one: a device that asked after a failure alone would show it."""
    device, fetch = both.device(), both.fetch()
    for _ in range(2):
        fetch(device, both.round, KEYS)
    assert [path for _, path, *_ in both.relay.seen].count("/v1/relay/keys") == 2


def test_a_round_that_is_gone_is_too_late(both):
    device = both.device()
    hold = both.service.rounds.hold

    def removed(round_id):
        raise TooLateError("removed: got an old round; expected newer; check in")

    device.known(both.round)
    both.service.rounds.hold = removed
    with pytest.raises(TooLateError):
        both.fetch()(device, both.round, KEYS)
    both.service.rounds.hold = hold


def test_slices_that_are_not_those_of_the_round_are_left_out(both, monkeypatch):
    device = both.device()
    real = gateways.with_paths
    monkeypatch.setattr(gateways, "with_paths", lambda tree, keys, r: real(tree, keys, r ^ 1))
    found = both.fetch()(device, both.round, KEYS)
    assert not any(map(len, found.keys.values()))
    assert found.wrong == sum(map(len, KEYS.values()))


def test_keys_that_are_too_many_or_outside_are_refused_before_anything_is_sent(both):
    device = both.device()
    fetch = both.fetch(pinned=encode_configs([both.key.config]))
    for keys in ({"word": [0, 1, 2, 3, 4], "neuron": []}, {"word": [8], "neuron": []}):
        with pytest.raises(KeySpaceError):
            fetch(device, both.round, keys)
    assert not both.relay.seen


def test_a_round_that_does_not_say_how_many_keys_needs_to_be_told(both):
    _, round_id = both.publish(seed=3, settings={})
    device = both.device()
    with pytest.raises(InputError, match="not known to how many"):
        both.fetch()(device, round_id, KEYS)
    found = both.fetch(max_keys={"word": 3, "neuron": 2})(device, round_id, KEYS)
    assert_trees_equal(found.model, device.fetch(round_id, KEYS).model)


def test_a_table_that_every_device_takes_whole_is_downloaded(both):
    _, round_id = both.publish(seed=6, settings={"keys_per_client": {"word": 4, "neuron": 6}})
    device = both.device()
    found = both.fetch()(device, round_id, KEYS)
    assert_trees_equal(found.model, device.fetch(round_id, KEYS).model)
    (body,) = both.relay.bodies("/v1/relay")
    assert (len(body) - 8) // _each(body) == 4  # words alone
    assert [path for _, path, *_ in both.gateway.seen if "/segments/" in path]


def test_answers_that_are_longer_than_a_device_takes_come_in_several(both):
    device = both.device(max_answer=2000)
    found = both.fetch()(device, both.round, KEYS)
    bodies = both.relay.bodies("/v1/relay")
    assert [(len(body) - 8) // _each(body) for body in bodies] == [3, 3, 1]
    assert_trees_equal(found.model, device.fetch(both.round, KEYS).model)


def wide(words, width=1):
    return kh.Layout.of(
        zeros(embed=(words, width), small=(5, 1)),
        kh.Cut(kh.KeySpace("word", words), {"embed": 0}),
        kh.Cut(kh.KeySpace("row", 5), {"small": 0}),
    )


@pytest.mark.parametrize(
    ("words", "options"),
    [(8, {"max_requests": 7}), (8, {"max_bytes": 31}), (70_000, {})],
    ids=["requests", "bytes", "by default"],
)
def test_a_round_that_asks_for_more_than_a_device_does_is_refused_before_a_request_is_sealed(
    both, words, options
):
    """Seven words and a row, four bytes each: or seventy thousand, which would take seconds."""
    limit = {"word": words - 1, "row": 1}
    _, round_id = both.publish(layout=wide(words), settings={"keys_per_client": limit})
    device, fetch = both.device(), both.fetch(**options)
    before = len(both.relay.seen)
    with pytest.raises(ServiceError, match="more requests than this device makes"):
        fetch(device, round_id, {"word": [1], "row": [2]})
    assert len(both.relay.seen) == before  # not even the key configuration was asked for
    if options:
        enough = {name: number + 1 for name, number in options.items()}
        both.fetch(**enough)(device, round_id, {"word": [1], "row": [2]})


def test_one_answer_that_is_longer_than_it_can_be_is_left_out(both):
    """Or a gateway could see by whose failure which device it had made an answer longer for."""
    device, line = both.device(), line_to(both.stack, both.service.url)
    forward = line.forward

    async def lengthen(sealed):
        answers = await forward(sealed)
        return [answers[0] + bytes(5000), *answers[1:]]

    line.forward = lengthen
    keys = {"word": [0, 1, 2, 3], "neuron": [0, 1, 2]}  # all that a device may ask for
    with serving(RelayApp(line, mix=Mix(0.0))) as url:
        found = both.fetch(url)(device, both.round, keys)
    assert sum(map(len, found.keys.values())) == 6
    assert found.wrong == 1
