"""docs/wire.md on sums of whole updates: layouts, lengths, routes and limits are the code's."""

import asyncio
import hmac
import re
import struct
from base64 import b64encode, urlsafe_b64encode
from contextlib import closing
from hashlib import sha256
from math import inf, log, sqrt
from typing import get_args

import httpx
import msgspec
import numpy as np
import pytest

from keyhole.aggregation import shares as sum_messages
from keyhole.aggregation.shares import (
    HIDING_NOISE,
    SEAL_BYTES,
    open_share,
    pack_list,
    pack_receipt,
    pack_share,
    seal_share,
)
from keyhole.aggregation.two_servers.method import TwoServers
from keyhole.aggregation.two_servers.params import SPARSE_OWN_BYTES, SumParams, part_params
from keyhole.crypto.codec import CHECK_BYTES
from keyhole.crypto.hpke import PrivateKey, open_from
from keyhole.crypto.prg import Prg
from keyhole.errors import InputError
from keyhole.service.access import Keyring
from keyhole.service.aggregator import AggregatorApp, Keyrings
from keyhole.service.finishing import PeerLine
from keyhole.service.sum_files import SumFiles
from keyhole.service.sums import AggregatorSettings
from keyhole.wire.assignment import shown
from keyhole.wire.http import HttpClient
from keyhole.wire.manifest import digest_of
from keyhole.wire.messages import Failure, Summaries, SumOpening, SumPhase, SumStatus, peer_name
from keyhole.wire.settings import sum_settings
from tests.aggregation.two_servers.two_server_sums import (
    PARTS,
    add_all,
    agree,
    server_of,
    shares_of,
    terms_of,
)
from tests.helpers import DIGEST, ROOT

PAGE = (ROOT / "docs" / "wire.md").read_text()
WHOLE = PAGE.partition("**Two servers, whole updates.**")[2].partition("**One server.**")[0]
AGGREGATORS = PAGE.partition("\n## Aggregators\n")[2].partition("\n## ")[0]
ROUND, NOW = f"3-{DIGEST}", 1_800_000_000.0
MODEL = digest_of(ROUND)
COHORT = [f"client-{i}" for i in range(6)]
OCTETS = {"content-type": "application/octet-stream"}


# Bytes


def terms_by_the_page(terms):
    said = "KHM2", terms.bits, terms.with_counts, len(terms.parts)
    head = said[0].encode() + struct.pack("<BBH", *said[1:]) + terms.round
    clients = terms.max_clients, terms.min_clients, terms.room, terms.min_per_key
    head += struct.pack("<QQQQ", *clients)
    head += struct.pack("<dddd", terms.clip, terms.norm, terms.noise, terms.count_noise)
    parts = [struct.pack("<QQQQ", p.num_keys, p.width, p.max_keys, p.is_sparse) for p in PARTS]
    return head + b"".join(parts)


def head_by_the_page(terms, kind, server):
    name = terms.round + sha256(terms_by_the_page(terms) + MODEL).digest()
    return b"KHX2" + bytes([kind, server, 0, 0]) + name


def sealed(message):
    return message + sha256(message).digest()[:16]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"bits": 16, "with_counts": True, "clip": 1.0},
        {"min_per_key": 3, "count_noise": 0.5},
    ],
)
def test_terms_are_laid_out_as_the_page_says(changes):
    terms = terms_of(**changes)
    assert terms.encode() == terms_by_the_page(terms)
    first, more = map(int, re.search(r"terms, (\d+) and (\d+) more for each part", WHOLE).groups())
    assert len(terms.encode()) == first + more * len(terms.parts)
    assert sum_settings(terms.encode()) == {"sum_terms": b64encode(terms.encode()).decode()}


@pytest.mark.parametrize("bits", [16, 32])
def test_the_scale_is_that_of_the_page(bits):
    terms = terms_of(bits=bits, clip=3.0, room=2)
    limit, scale = 2 ** (bits - 1) / (terms.max_clients + 2), terms.fixed_point.scale
    assert scale == 2.0 ** round(np.log2(scale))
    assert 3.0 * scale + 1 < limit <= 3.0 * (2 * scale) + 1


def test_the_room_for_noise_is_that_of_the_page():
    minimum = 2 * sqrt(128 * log(2))
    assert "2 sqrt(128 ln 2)" in WHOLE
    terms_of(clip=1.0, room=19, noise=19 / minimum)
    with pytest.raises(InputError):
        terms_of(clip=1.0, room=19, noise=19.01 / minimum)


def test_messages_of_a_client_are_laid_out_as_the_page_says():
    terms = terms_of(bits=16, with_counts=True, clip=1.0)
    ones = np.ones((2, 3), np.uint16), np.ones((1, 2), np.uint16), np.ones((1, 1), np.uint16)
    rows = list(zip(map(np.array, ([30, 2], [4], [8])), ones, strict=True))
    made = shares_of(terms, rows, model=MODEL)
    assert made.public[:56] == head_by_the_page(terms, 1, 0)
    inner = made.public[72:]  # nonce, then what each sparse part has of its own
    for place in (0, 2):
        name = sha256(b"keyhole part" + terms.round + struct.pack("<Q", place)).digest()[:16]
        assert inner[:24] == b"KHW1\1\0\0\0" + name
        inner = inner[terms.public_lengths[place] :]
    assert inner == b""
    seed, dense = made.to[0][88 + 120 : 88 + 136], made.to[1][88 + 120 : -136]
    for party, middle in enumerate((seed, dense)):
        own = made.to[party]
        assert own[:56] == head_by_the_page(terms, 2, party)
        assert own[56:88] == sha256(made.public).digest()
        assert own == sealed(own[:208] + middle + own[-136:-16])
    whole = np.zeros((7, 3), "<u2")
    whole[4] = 1  # the row of key 4 and its count
    mask = np.frombuffer(Prg(seed).bytes(42), "<u2").reshape(7, 3)
    assert dense == (whole - mask).tobytes()
    assert len(made.to[0]) == 104 + 2 * SPARSE_OWN_BYTES + 16
    assert len(made.to[1]) == 104 + 2 * SPARSE_OWN_BYTES + 42


def test_messages_of_servers_are_laid_out_as_the_page_says():
    terms = terms_of()
    rows = [(np.zeros(0, np.int64), np.zeros((0, p.width), np.uint32)) for p in PARTS]
    names = enumerate(COHORT[3:5])
    sent = {name: shares_of(terms, rows, seed, MODEL) for seed, name in names}
    servers = server_of(terms, 0, model=MODEL), server_of(terms, 1, model=MODEL)
    facts = servers[1].facts
    for server in servers:
        for name, shares in sent.items():
            server.accept(name, shares.to[server.party])
    cohort = sha256(b"".join(f"{name}\0".encode() for name in COHORT)).digest()
    digests = [sha256(shares.public).digest() for shares in sent.values()]
    listed = struct.pack("<QQ", 3, 4) + b"".join(digests)
    count, places = struct.pack("<Q", 2), struct.pack("<QQ", 3, 4)
    params = sha256(terms_by_the_page(terms)).digest()
    receipt = MODEL + params + cohort + count + places + sha256(listed).digest()
    by_place = dict(zip((3, 4), digests, strict=True))
    expected = sealed(head_by_the_page(terms, 3, 1) + cohort + count + listed)
    assert pack_list(facts, 1, cohort, by_place) == expected
    agree(servers)
    expected_receipt = sealed(head_by_the_page(terms, 4, 1) + receipt)
    assert pack_receipt(facts, 1, servers[1].receipt) == expected_receipt
    add_all(servers, sent)
    _, *rows, _ = pieces = servers[1].share()
    table, given = b"".join(rows), b"".join(pieces)
    assert given == b"".join(pack_share(facts, 1, servers[1].receipt, rows))
    assert len(table) == sum(4 * np.prod(terms.shape(place)) for place in range(len(PARTS)))
    told = count + bytes(8) + sha256(receipt).digest() + bytes(32)
    assert given == sealed(head_by_the_page(terms, 5, 1) + told + table)
    assert (len(expected), len(expected_receipt)) == (112 + 40 * 2, 208 + 8 * 2)
    assert len(given) == 152 + len(table)


def test_counts_are_laid_out_as_the_page_says():
    terms = terms_of(min_per_key=2, with_counts=False)
    ones = [(np.arange(p.max_keys), np.ones((p.max_keys, p.width), np.uint32)) for p in PARTS]
    sent = {name: shares_of(terms, ones, seed, MODEL) for seed, name in enumerate(COHORT[:2])}
    servers = server_of(terms, 0, model=MODEL), server_of(terms, 1, model=MODEL)
    for server in servers:
        for name, shares in sent.items():
            server.accept(name, shares.to[server.party])
    agree(servers)
    add_all(servers, sent)
    counts = [server.counts() for server in servers]
    for party, message in enumerate(counts):
        assert message == sealed(head_by_the_page(terms, 6, party) + message[56:-16])
    both = sum(np.frombuffer(message[56:-16], "<u4") for message in counts)
    expected = [2 * (np.arange(p.num_keys) < p.max_keys) for p in PARTS]
    np.testing.assert_array_equal(both, np.concatenate(expected))
    for server in servers:
        server.drop(*counts)
    given = b"".join(servers[0].share())
    assert given[64:72] == bytes(8)  # nobody's row was of too few
    assert given[104:136] == sha256(b"".join(counts)).digest()
    assert len(given) == 152 + sum(4 * p.num_keys * p.width for p in PARTS)


def test_a_share_is_sealed_as_the_page_says():
    """By the page, with nothing of ours but HPKE itself."""
    key = PrivateKey.fresh()
    sealed = seal_share(key.public, ROUND, "phone-1", "kh2.payload.mac", b"body")
    assert sealed[:8] == sha256(key.public).digest()[:8]
    bound = ROUND.encode() + b"\0" + b"phone-1"
    opened = open_from(key, sealed[8:40], b"keyhole share 3\0kh2.payload.mac")
    opened = opened.open(bound, sealed[40:])
    assert opened == open_share(key, ROUND, "phone-1", "kh2.payload.mac", sealed) == b"body"
    digest = sha256(b"keyhole shown token\0kh2.payload.mac").digest()
    seen = urlsafe_b64encode(digest).decode().rstrip("=")
    assert shown("kh2.payload.mac") == f"kh2s.payload.{seen}"
    assert len(sealed) == len(b"body") + SEAL_BYTES
    assert f"{SEAL_BYTES} bytes more" in WHOLE


def test_kinds_and_lengths_of_the_table_are_those_of_the_code():
    rows = re.findall(r"^\| (\d) \| (\w+),? .*\| ([^|]+) \|$", WHOLE, re.M)
    assert {name: int(kind) for kind, name, _ in rows} == sum_messages.FRAMING.kinds
    lengths = {name: length for _, name, length in rows}
    head, check = sum_messages.FRAMING.head_bytes, CHECK_BYTES
    assert f"a head of {head} bytes" in WHOLE
    assert lengths == {
        "public": f"{head + 16} and those",
        "own": f"{head + 32 + check} and those",
        "list": f"{head + 32 + 8 + check} + {8 + 32} n",
        "receipt": f"{head + sum_messages._RECEIPT.size + 32 + check} + 8 n",
        "share": f"{head + sum_messages._SHARE.size + check} and the rows",
        "counts": f"{head + check} and those",
    }
    assert f"(`KHW1`, {SPARSE_OWN_BYTES})" in WHOLE


# Routes


class Service:
    """One aggregator in this process; the other one is nowhere."""

    def __init__(self, directory, party):
        rings = [Keyring((bytes([n]) * 32,)) for n in (1, 2, 3)]
        self.rings = dict(zip(("device", "trainer", "peer"), rings, strict=True))
        peer = PeerLine(HttpClient("http://127.0.0.1:9"), rings[2], party)
        # Files are of today, and the clock is not: no sum is ever overdue.
        settings = AggregatorSettings(party, min_clients=2, close_after=inf)
        files = SumFiles(directory)
        self.app = AggregatorApp(files, settings, Keyrings(*rings), peer, clock=lambda: NOW)

    def close(self):
        self.app.close()

    def token(self, caller, name):
        to = {"audience": "aggregator"}
        return self.rings[caller].issue("device", name, now=NOW, seconds=60, **to)

    def ask(self, method, path, caller, name, body=b"", headers=OCTETS, token=None):
        token = token or self.token(caller, name)
        headers = {**headers, "authorization": f"Bearer {token}"}

        async def run():
            transport = httpx.ASGITransport(self.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
                return await client.request(method, path, content=body, headers=headers)

        return asyncio.run(run())

    def trainer(self, method, path="", body=None, name="trainer"):
        content = b"" if body is None else msgspec.json.encode(body)
        return self.ask(method, f"/v1/sums/{ROUND}{path}", "trainer", name, content)

    def send(self, device, body, **more):
        token, path = self.token("device", device), f"/v1/sums/{ROUND}/shares"
        sealed = seal_share(self.app.sums.files.key.public, ROUND, device, token, body)
        return self.ask("POST", path, "device", device, sealed, token=shown(token), **more)


@pytest.fixture(params=[0, 1])
def service(tmp_path, request):
    with closing(Service(tmp_path, request.param)) as made:
        made.party = request.param
        yield made


def opening(party, terms=None, cohort=COHORT):
    return {"party": party, "terms": (terms or terms_of()).encode(), "cohort": cohort}


def said(answer):
    return answer.status_code, answer.json()


def test_opening_is_answered_as_the_page_says(service):
    party = service.party
    few, limit = terms_of(min_clients=1), AggregatorSettings(party).max_sums
    assert service.trainer("POST", body=opening(1 - party)).status_code == 409
    assert service.trainer("POST", body=opening(party, few)).status_code == 400
    assert service.trainer("POST", body=opening(party, cohort=["a"] * 2)).status_code == 413
    assert service.trainer("GET").status_code == 404
    assert said(service.trainer("POST", body=opening(party))) == (201, {"sum": "opened"})
    assert said(service.trainer("POST", body=opening(party))) == (200, {"sum": "known"})
    assert service.trainer("POST", body=opening(party, cohort=COHORT[1:])).status_code == 409
    assert service.trainer("GET", name="another").status_code == 404
    listed = service.ask("GET", "/v1/sums", "trainer", "trainer")
    assert said(listed) == (200, {"rounds": [ROUND]})
    for number in range(1, limit + 1):
        terms = SumParams(bytes([number]) * 16, PARTS, 6, 2)
        path, body = f"/v1/sums/1{number}-{ROUND[2:]}", opening(party, terms)
        last = service.ask("POST", path, "trainer", "trainer", msgspec.json.encode(body))
    assert (number, last.status_code) == (limit, 503)
    assert f"if {limit} other sums are here" in AGGREGATORS
    assert said(service.trainer("POST", "/forget")) == (200, {"sum": "forgotten"})
    assert service.trainer("POST", body=opening(party)).status_code == 410


def test_a_share_is_answered_as_the_page_says(service):
    terms, party = terms_of(), service.party
    rows = [(np.zeros(0, np.int64), np.zeros((0, p.width), np.uint32)) for p in PARTS]
    made = [shares_of(terms, rows, seed, MODEL) for seed in range(2)]
    body, other = (one.to[party] + (one.public if party == 0 else b"") for one in made)
    assert len(body) + SEAL_BYTES == terms.facts.body_bytes(party)
    assert service.send(COHORT[0], body).status_code == 404
    service.trainer("POST", body=opening(party))
    assert service.send("somebody", body).status_code == 403
    assert service.send(COHORT[0], body + b"0").status_code == 413
    assert service.send(COHORT[0], body, headers={}).status_code == 415
    assert service.send(COHORT[0], body[:-1]).status_code == 400
    assert service.send(COHORT[0], bytes(len(body))).status_code == 400
    assert said(service.send(COHORT[0], body)) == (201, {"share": "stored"})
    assert said(service.send(COHORT[0], body)) == (200, {"share": "known"})
    assert said(service.send(COHORT[0], other)) == (201, {"share": "stored"})
    foreign = shares_of(terms, rows, 2)
    body_of_another = foreign.to[party] + (foreign.public if party == 0 else b"")
    assert service.send(COHORT[1], body_of_another).status_code == 400
    assert service.trainer("POST", "/close", {"taken": COHORT}).status_code == 413
    assert service.trainer("GET").json()["phase"] == "open"
    closing_sum = service.trainer("POST", "/close")
    assert closing_sum.json()["phase"] == "closing"
    assert closing_sum.headers["cache-control"] == "no-store"
    assert service.send(COHORT[1], other).status_code == 410
    assert said(service.send(COHORT[0], other)) == (200, {"share": "known"})
    assert service.send(COHORT[0], body).status_code == 409


def test_what_is_not_so_far_is_answered_as_the_page_says(service):
    service.trainer("POST", body=opening(service.party))
    for path in ("/list", "/receipt", "/counts", f"/publics/{COHORT[0]}"):
        asked = f"/v1/sums/{ROUND}{path}"
        answer = service.ask("GET", asked, "peer", peer_name(1 - service.party))
        assert answer.status_code == 503
        assert service.ask("GET", asked, "peer", peer_name(service.party)).status_code == 403
        as_trainer = service.ask("GET", asked, "trainer", "trainer").status_code
        assert as_trainer == (503 if path == "/receipt" else 401)
    assert service.trainer("GET", "/share").status_code == 503
    service.trainer("POST", "/forget")
    assert said(service.trainer("POST", "/forget")) == (200, {"sum": "forgotten"})


def test_every_route_phase_and_name_of_an_aggregator_is_on_the_page():
    routes = AggregatorApp.routes(_Unbound())
    for route in routes:
        shown = re.escape(route.pattern.replace("{round}", "{id}"))
        (method,) = route.methods
        found = re.search(rf"^{method} +{shown} +(trainer|device|peer) ", AGGREGATORS, re.M)
        assert found, route.pattern
    assert len(re.findall(r"^(?:GET|POST) +/v1/sums", AGGREGATORS, re.M)) == len(routes)
    for phase in get_args(SumPhase):
        assert f"`{phase}`" in AGGREGATORS
    for message in (SumOpening, Failure, SumStatus, Summaries):
        for name in message.__struct_fields__:
            assert re.search(rf"[`\"]{name}[`\"]", AGGREGATORS), name
    assert all(f"`{peer_name(party)}`" in AGGREGATORS for party in (0, 1))


class _Unbound:
    """Stands for the routes: their patterns are asked for, not their handlers."""

    def __getattr__(self, name):
        return None


def test_the_limits_on_the_page_are_the_defaults():
    limits = AggregatorSettings(0)
    assert limits.min_clients is None
    assert TwoServers().about.min_clients_for(60) == 40
    assert TwoServers(noise=1.0).about.min_clients_for(60) == 2
    told = f"two thirds of the cohort, or 2 where noise / norm is {HIDING_NOISE} or more"
    assert told in AGGREGATORS
    assert f"(`--close-after`, {limits.close_after:,.0f} seconds)" in AGGREGATORS
    assert f"{limits.max_table >> 20:,} MB of a share of the sum" in AGGREGATORS
    assert re.search(rf"{limits.max_upload >> 20} MB of a\s+device's body", AGGREGATORS)
    assert f"{limits.max_cohort:,} devices" in AGGREGATORS
    assert terms_of().norm == inf


def test_what_secure_sums_says_of_bytes_follows_from_the_terms():
    part = part_params(100_000, 500, 1000, 32, False)
    terms = SumParams(bytes(16), (part,), max_clients=50, min_clients=2)
    sent = sum(terms.facts.body_bytes(party) for party in (0, 1))
    clear = 1000 * 500 * 4 + 1000 * 8
    shown = f"{sent / 1e6:.2f} MB to both, {sent / clear:.2f} x clear"
    assert shown in (ROOT / "docs" / "secure-sums.md").read_text()


@pytest.mark.parametrize("party", [0, 1])
def test_the_key_of_an_aggregator_follows_from_the_services_as_the_page_says(party):
    text, key = f"keyhole aggregator {party}", b"k" * 32
    assert text in " ".join(PAGE.split())
    (found,) = Keyring((key,)).for_aggregator(party).keys
    assert found == hmac.digest(key, text.encode(), "sha256")
