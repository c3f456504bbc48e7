"""Whole updates and their two servers, for tests."""

from dataclasses import replace
from hashlib import sha256

import numpy as np

from keyhole.aggregation.shares import NO_MODEL, pack_shares, read_share
from keyhole.aggregation.sum_server import SumServer
from keyhole.aggregation.two_servers.client import split_rows
from keyhole.aggregation.two_servers.params import PartParams, SumParams
from keyhole.aggregation.two_servers.server import TwoServerAdder, tables_of
from keyhole.crypto.prg import Prg

COHORT = [f"client-{i}" for i in range(6)]
# Sparse, dense and sparse again, whatever would take fewer bytes.
PARTS = PartParams(40, 3, 4, True), PartParams(7, 2, 7, False), PartParams(9, 1, 2, True)


def terms_of(**changes):
    given = {
        "round": sha256(b"round").digest()[:16],
        "parts": PARTS,
        "max_clients": len(COHORT),
        "min_clients": 2,
        **changes,
    }
    return SumParams(**given)


def rows_of(terms, seed):
    rng, rows = np.random.default_rng(seed), []
    for part in terms.parts:
        keys = rng.choice(part.num_keys, rng.integers(0, part.max_keys + 1), replace=False)
        shape = len(keys), part.width
        limit = np.iinfo(terms.dtype).max
        rows.append((keys, rng.integers(0, limit, shape, terms.dtype, endpoint=True)))
    return rows


def share_update(terms, rows, prg, model=NO_MODEL):
    """What a client sends of an update, as `SumClient` packs it."""
    facts = replace(terms.facts, model=model)
    return pack_shares(facts, split_rows(terms, rows, prg), prg)


def shares_of(terms, rows, seed=0, model=NO_MODEL):
    return share_update(terms, rows, Prg(sha256(b"shares %d" % seed).digest()[:16]), model)


def plain_sum(terms, clients):
    """The sum in the ring, as it is defined, with counts where the terms have them."""
    totals = [np.zeros(terms.shape(place), terms.dtype) for place in range(len(terms.parts))]
    for rows in clients:
        for total, part, (keys, values) in zip(totals, terms.parts, rows, strict=True):
            np.add.at(total, (keys, slice(None, part.width)), values)
            total[keys, part.width :] += np.array(1, terms.dtype)
    return totals


def server_of(terms, party, cohort=COHORT, model=NO_MODEL):
    facts = replace(terms.facts, model=model)
    return SumServer(facts, party, cohort, TwoServerAdder(terms, party))


def share_of(server, *noise):
    """What a server gives out, as the trainer reads it."""
    pieces = server.share(*noise)
    return read_share(server.facts, server.party, b"".join(bytes(piece) for piece in pieces))


def combined(terms, *shares):
    """The sum of each part in the ring."""
    tables = [tables_of(terms, share.payload) for share in shares]
    return [one + other for one, other in zip(*tables, strict=True)]


def servers_of(terms, sent, reach=lambda party, name: True):
    """Both servers, which have accepted what reached them."""
    servers = server_of(terms, 0), server_of(terms, 1)
    for server in servers:
        for name, shares in sent.items():
            if reach(server.party, name):
                server.accept(name, shares.to[server.party])
    return servers


def agree(servers):
    one, other = servers
    lists = one.close(), other.close()
    receipts = one.reduce(lists[1]), other.reduce(lists[0])
    one.agree(receipts[1])
    other.agree(receipts[0])


def add_all(servers, sent):
    for server in servers:
        for name in server.clients:
            server.add(name, sent[name].public, sent[name].to[server.party])
