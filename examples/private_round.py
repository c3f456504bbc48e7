"""One round in which the select is private and the sum is secure, and what each party saw of it.

    python examples/private_round.py

Two servers hold the same model. Each client retrieves the rows of its words without saying which,
trains, and shares its update so that the servers together learn the sum and neither learns more.
"""

import numpy as np

from keyhole.aggregation.two_servers.client import share_update
from keyhole.aggregation.two_servers.params import PartParams, SumParams
from keyhole.aggregation.two_servers.server import SumServer, combine_shares
from keyhole.crypto.prg import Prg
from keyhole.delivery.exchange import name_of_round
from keyhole.delivery.pir import two_server
from keyhole.delivery.pir.database import Database

WORDS, WIDTH, MAX_KEYS = 2_000, 16, 100
CLIENTS = {"ann": range(60), "ben": range(40, 140), "cem": range(1_900, 1_990)}
MODEL = np.random.default_rng(0).normal(size=(WORDS, WIDTH)).astype(np.float32)


def train(rows):
    """Stands for local training; the update is start minus end."""
    return 0.1 * rows


def retrieve(client, servers, keys, views):
    """The rows of some words, from servers that do not learn which."""
    query = client.query(keys)
    messages = query.messages()
    for view, message in zip(views, messages, strict=True):
        view.append(message)
    replies = [s.answer([m])[0] for s, m in zip(servers, messages, strict=True)]
    found = query.decode(replies)
    return found.records.view(np.float32), found.is_found


def add_up(adders, sent):
    """Both servers agree whom they have, add them, and give out their shares of the sum."""
    one, other = adders
    lists = one.close(), other.close()
    agreed = one.reduce(lists[1]), other.reduce(lists[0])
    one.agree(agreed[1])
    other.agree(agreed[0])
    for party, adder in enumerate(adders):
        for name in adder.clients:
            adder.add(name, sent[name].public, sent[name].to[party])
    return one.share(), other.share()


def main():
    database = Database.of(name_of_round("1-example"), MODEL.view(np.uint8).reshape(WORDS, -1))
    terms = two_server.params_of(database, MAX_KEYS)
    client = two_server.TwoServerClient(terms)
    servers = [two_server.TwoServer(database, terms, place) for place in (0, 1)]
    part = PartParams(WORDS, WIDTH, MAX_KEYS, is_sparse=True)
    sums = SumParams(bytes(16), (part,), max_clients=len(CLIENTS), min_clients=2, clip=4.0)
    fixed, adders = sums.fixed_point, [SumServer(sums, party, list(CLIENTS)) for party in (0, 1)]

    expected, views, sent = np.zeros_like(MODEL), ([], []), {}
    for name, words in CLIENTS.items():
        keys = np.array(words)
        rows, is_found = retrieve(client, servers, keys, views)
        keys, rows = keys[is_found], rows[is_found]  # one client in thousands misses a key
        update = train(rows)
        sent[name] = shares = share_update(sums, [(keys, fixed.encode(update, Prg.fresh()))])
        for adder, own, view in zip(adders, shares.to, views, strict=True):
            adder.accept(name, own)
            view += [shares.public, own]
        expected[keys] += update
        print(f"{name}: {len(keys)} words, retrieved, trained, shared")

    one, other = add_up(adders, sent)
    total = fixed.decode(combine_shares(one, other)[0])

    for number, (view, share) in enumerate(zip(views, (one, other), strict=True)):
        lengths = sorted({len(message) for message in view})
        touched = np.count_nonzero(share.parts[0].any(axis=1))
        print(
            f"server {number} saw {len(view)} messages of {lengths} bytes, the same for everyone,"
        )
        print(f"  and holds a share of the sum in which {touched} of {WORDS} rows are not zero")
    right = np.abs(total - expected).max() <= len(CLIENTS) * fixed.rounding
    known = np.count_nonzero(total.any(axis=1))
    print(f"both shares together: {known} rows of the sum, right: {right}")


if __name__ == "__main__":
    main()
