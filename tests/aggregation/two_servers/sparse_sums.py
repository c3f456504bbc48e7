"""Sums of one sparse part: clients, both servers, and what must come out."""

from dataclasses import dataclass

import numpy as np

from keyhole.aggregation.two_servers.client import convert, share_rows, tree_aes
from keyhole.aggregation.two_servers.params import SparseParams
from keyhole.aggregation.two_servers.server import SparsePart
from keyhole.crypto.dpf import apply_corrections, extend, root_seeds
from keyhole.crypto.prg import Prg
from keyhole.delivery.base import name_of_round

ROUND = name_of_round("round-7")


def terms_of(num_keys=20, width=3, max_keys=4, bits=32, min_clients=1, with_counts=False):
    return SparseParams(ROUND, num_keys, width, max_keys, bits, min_clients, with_counts)


def seeded(number):
    return Prg(number.to_bytes(16, "little"))


def uniform_rows(terms, count, seed=0):
    """Rows of all ring elements, (count, width)."""
    return np.random.default_rng(seed).integers(0, 2**terms.bits, (count, terms.width), terms.dtype)


@dataclass(frozen=True)
class Client:
    """What a client has and what it sends."""

    keys: np.ndarray
    rows: np.ndarray
    shares: object

    def to(self, party):
        return self.shares.public, self.shares.to[party]


def client_of(terms, keys, seed=0, rows=None):
    keys = np.array(keys, np.int64)
    rows = uniform_rows(terms, len(keys), seed) if rows is None else rows
    return Client(keys, rows, share_rows(terms, keys, rows, seeded(seed)))


def servers_of(terms, clients):
    """The part at both servers, with these clients added."""
    servers = SparsePart(terms, 0), SparsePart(terms, 1)
    for party, server in enumerate(servers):
        for client in clients:
            server.add(*client.to(party))
    return servers


def shares_of(servers):
    """What both have added."""
    return [server.take() for server in servers]


def secure_sum(terms, clients):
    one, other = shares_of(servers_of(terms, clients))
    return one + other


def plain_sum(terms, clients):
    """The definition: rows are added to those of their keys, and counted if the terms say so."""
    total = np.zeros((terms.num_keys, terms.row), terms.dtype)
    for client in clients:
        for key, row, is_placed in zip(
            client.keys, client.rows, client.shares.is_placed, strict=True
        ):
            if is_placed:
                total[key, : terms.width] += row
                total[key, terms.width :] += 1
    return total


def plain_share(terms, party, root, corrections):
    """One client's share at one server, position by position, as the equation reads."""
    total = np.zeros((terms.num_keys, terms.row), terms.dtype)
    tree, roots = tree_aes(corrections.nonce), root_seeds(root, terms.num_buckets)
    sign = terms.dtype.type(1 if party == 0 else 2**terms.bits - 1)
    for bucket, members in enumerate(terms.placement.members()):
        for position, key in enumerate(members):
            if key < 0:
                continue
            seed, control = roots[bucket : bucket + 1], np.array([party == 1])
            for level in range(terms.depth):
                children, bits = extend(tree, seed)
                words = corrections.seeds[bucket, level], corrections.bits[bucket, level]
                apply_corrections(children, bits, control, *words)
                side = position >> (terms.depth - 1 - level) & 1
                seed, control = children[:, side].copy(), bits[:, side]
            (row,) = convert(seed, terms.row, terms.dtype, corrections.nonce)
            total[key] += sign * (row + control[0] * corrections.rows[bucket])
    return total
