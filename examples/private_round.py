"""One round in which the select is private and the sum is secure, and what each party saw of it.

    python examples/private_round.py

Two servers hold the same model. Each client retrieves the rows of its words without saying which,
trains, and shares its update so that the servers together learn the sum and neither learns more.
"""

import numpy as np

from keyhole import Cut, KeySpace, Layout
from keyhole.aggregation.base import Rounding
from keyhole.aggregation.exchange import SumRound, add_all, client_of, combine, server_of
from keyhole.aggregation.shares import NO_MODEL, read_share
from keyhole.aggregation.two_servers.method import TwoServers
from keyhole.delivery.base import PrivateTable
from keyhole.delivery.paths import Top, top_of
from keyhole.delivery.pir import two_server
from keyhole.delivery.pir.database import Database

WORDS, WIDTH, MAX_KEYS = 2_000, 16, 100
CLIENTS = {"ann": range(60), "ben": range(40, 140), "cem": range(1_900, 1_990)}
MODEL = np.random.default_rng(0).normal(size=(WORDS, WIDTH)).astype(np.float32)
WORD = KeySpace("word", WORDS)
LAYOUT = Layout.of({"rows": MODEL}, Cut(WORD, {"rows": 0}))
SUM = TwoServers(Rounding(clip=4.0), min_clients=2)


def train(rows):
    """Stands for local training; the update is start minus end."""
    return 0.1 * rows


def retrieve(client, servers, top, keys, views):
    """The rows of some words, from servers that do not learn which, compared with the root."""
    query = client.query(keys)
    messages = query.messages()
    for view, message in zip(views, messages, strict=True):
        view.append(message)
    replies = [s.answer([m])[0] for s, m in zip(servers, messages, strict=True)]
    found = query.decode(replies).checked(top, keys)
    return found.records.view(np.float32), found.is_found


def add_up(adders, sent):
    """Both servers agree whom they have, add them, and give out their shares of the sum."""
    one, other = adders
    lists = one.close(), other.close()
    receipts = one.reduce(lists[1]), other.reduce(lists[0])
    one.agree(receipts[1])
    other.agree(receipts[0])
    return [give_out(adder, sent) for adder in adders]


def give_out(adder, sent):
    """One server's share of the sum."""
    bodies = {name: shares.bodies[adder.party] for name, shares in sent.items()}
    add_all(adder, bodies.__getitem__, lambda name: sent[name].public)
    return read_share(adder.facts, adder.party, b"".join(adder.share()))


def main():
    records = MODEL.view(np.uint8).reshape(WORDS, -1)
    table = PrivateTable.of("1-example", bytes(32), records, MAX_KEYS)
    top = Top.of(WORDS, table.tree.root, top_of(table.tree))  # everybody fetches it
    database = Database.of(table)
    client = two_server.TwoServerClient(two_server.params_of(database))
    servers = two_server.servers_of(database)
    params = SUM.params(SumRound(LAYOUT, {"word": MAX_KEYS}, bytes(16), len(CLIENTS)))
    adders = [server_of(SUM, params, NO_MODEL, party, list(CLIENTS)) for party in (0, 1)]

    expected, views, sent = np.zeros_like(MODEL), ([], []), {}
    for name, words in CLIENTS.items():
        keys = np.array(words)
        rows, is_found = retrieve(client, servers, top, keys, views)
        keys, rows = keys[is_found], rows[is_found]  # one client in thousands misses a key
        update = train(rows)
        sender = client_of(SUM, params, NO_MODEL, LAYOUT)
        shares = sender.shard({"rows": update}, {"word": WORD.keys(keys)})
        for adder, own, view in zip(adders, shares.to, views, strict=True):
            adder.accept(name, own)
            view += [shares.public, own]
        sent[name] = shares
        expected[keys] += update
        print(f"{name}: {len(keys)} words, retrieved, trained, shared")

    shares = add_up(adders, sent)
    (total,) = combine(SUM, params, shares)

    for number, (view, share) in enumerate(zip(views, shares, strict=True)):
        lengths = sorted({len(message) for message in view})
        touched = np.count_nonzero(
            np.frombuffer(share.payload, "<u4").reshape(WORDS, -1).any(axis=1)
        )
        print(
            f"server {number} saw {len(view)} messages of {lengths} bytes, the same for everyone,"
        )
        print(f"  and holds a share of the sum in which {touched} of {WORDS} rows are not zero")
    error = np.abs(total.rows - expected[total.keys]).max()
    right = error <= len(CLIENTS) * SUM.rounding.for_clients(len(CLIENTS)).rounding
    print(f"both shares together: {len(total.keys)} rows of the sum, right: {right}")


if __name__ == "__main__":
    main()
