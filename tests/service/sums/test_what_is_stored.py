"""What each aggregator stores of a device, and gives out, does not tell keys or numbers apart.

A linear distinguisher and a chi-square test: they find bugs and prove nothing. A planted leak and
the sum of both shares show that they would find one.
"""

from hashlib import sha256

import msgspec
import numpy as np
import pytest

from keyhole.aggregation.shares import seal_share
from keyhole.aggregation.two_servers.params import PartParams, SumParams
from keyhole.crypto.prg import Prg
from keyhole.service.sum_files import SumFiles
from keyhole.service.sums import AggregatorSettings, Sums
from keyhole.wire.manifest import digest_of
from keyhole.wire.messages import SumOpening
from tests.aggregation.two_servers.two_server_sums import share_update
from tests.delivery.pir.distinguisher import bits_of, compare
from tests.service.sums.aggregators import round_name

ROUND = round_name()
CLIENTS = 120  # of each kind
PARTS = PartParams(7, 2, 2, True), PartParams(4, 2, 4, False)
TERMS = SumParams(bytes(16), PARTS, 2 * CLIENTS, 2, clip=1.0, bits=16)
NAMES = [f"device-{i}" for i in range(2 * CLIENTS)]
WORLDS = {
    "the first key or the last": (([0], 7, 1), ([6], 7, 1)),
    "no key or as many as there may be": (([], 7, 1), ([3, 5], 7, 1)),
    "zeros or ones": (([5], 0, 0), ([5], 2**16 - 1, 2**16 - 1)),
}
OWN_HEAD, PUBLIC_HEAD, PART_HEAD, PART_OWN = 56 + 32, 56, 56, 120


def rows_of(keys, number, dense):
    ring = np.uint16
    sparse = np.array(keys, np.int64), np.full((len(keys), 2), number, ring)
    return [sparse, (np.arange(4), np.full((4, 2), dense, ring))]


def stored(directory, world, party):
    """What an aggregator has on its disk of devices of either kind."""
    sums = Sums(SumFiles(directory), AggregatorSettings(party, min_clients=2))
    sums.open("trainer", ROUND, msgspec.json.encode(SumOpening(party, TERMS.encode(), NAMES)))
    for at, name in enumerate(NAMES):
        kind = at % 2
        prg = Prg(sha256(f"{world} {at}".encode()).digest()[:16])
        made = share_update(TERMS, rows_of(*WORLDS[world][kind]), prg, digest_of(ROUND))
        sealed = seal_share(sums.files.key.public, ROUND, name, "token", made.bodies[party])
        sums.upload(ROUND, name, "token", sealed)
    found = [sums.files.spool.read(ROUND, name) for name in NAMES]
    sums.files.close()
    return found[::2], found[1::2]


def secret_bytes(body, party):
    """The bytes that are not the same for everyone, and no digest of others."""
    own = body[: TERMS.facts.own_message_bytes(party)]
    root = own[OWN_HEAD + PART_HEAD : OWN_HEAD + PART_HEAD + 16]
    dense = own[OWN_HEAD + PART_OWN : -16]
    public = body[len(own) :]
    return root + dense + public[PUBLIC_HEAD : PUBLIC_HEAD + 16] + public[PUBLIC_HEAD + 16 + 56 :]


@pytest.mark.parametrize(
    "world",
    [
        "no key or as many as there may be",
        pytest.param("the first key or the last", marks=pytest.mark.slow),
        pytest.param("zeros or ones", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("party", [0, 1])
def test_what_an_aggregator_stores_does_not_tell_devices_apart(tmp_path, world, party):
    kinds = stored(tmp_path, world, party)
    assert len({len(body) for kind in kinds for body in kind}) == 1
    views = [bits_of([secret_bytes(body, party) for body in kind]) for kind in kinds]
    verdict = compare(*views)
    assert not verdict.tells_apart, verdict
    assert not verdict.biased, verdict


def test_a_mask_that_is_forgotten_would_be_found(tmp_path):
    """Negative control: the second aggregator is sent the rows themselves."""
    one, other = (
        [np.array(rows_of(*kind)[1][1]).tobytes() for _ in range(CLIENTS)]
        for kind in WORLDS["zeros or ones"]
    )
    assert compare(bits_of(one), bits_of(other)).tells_apart


@pytest.mark.parametrize("party", [0, 1])
def test_what_is_stored_and_given_out_of_large_rows_is_uniform(party):
    """Chi-square of bytes: 255 degrees of freedom, passed by chance once in 10^6 times at 373."""
    parts = PartParams(300, 64, 4, True), PartParams(200, 64, 200, False)
    terms = SumParams(bytes(16), parts, 2, 1)
    rows = [
        (np.array([1, 2]), np.ones((2, 64), np.uint32)),
        (np.arange(200), np.ones((200, 64), np.uint32)),
    ]
    made = share_update(terms, rows, Prg.fresh())
    large = made.to[1][OWN_HEAD + PART_OWN : -16] if party == 1 else made.public[-14 * 256 :]
    assert chi_square(np.frombuffer(large, np.uint8)) < 373
    assert chi_square(rows[1][1]) > 10**4


def chi_square(array):
    counts = np.bincount(np.ascontiguousarray(array).view(np.uint8).reshape(-1), minlength=256)
    expected = counts.sum() / 256
    return float(((counts - expected) ** 2).sum() / expected)
