"""Golden bytes of sums of whole updates: what devices, aggregators and trainers read.

Renew them with KEYHOLE_RENEW_GOLDEN=1.
"""

import numpy as np

from keyhole.aggregation.two_servers.params import PartParams
from tests.aggregation.two_servers.two_server_sums import (
    COHORT,
    add_all,
    server_of,
    shares_of,
    terms_of,
)
from tests.delivery.pir.golden import assert_golden

PARTS = PartParams(6, 1, 2, True), PartParams(2, 2, 2, False)


def rows(keys, number):
    sparse = np.array(keys, np.int64), np.full((len(keys), 1), number, np.uint16)
    return [sparse, (np.arange(2), np.full((2, 2), number, np.uint16))]


def test_messages_of_a_whole_sum_are_the_bytes_they_always_were():
    terms = terms_of(parts=PARTS, bits=16, with_counts=True, clip=1.0, norm=2.0)
    both = COHORT[1], COHORT[4]
    sent = {name: shares_of(terms, rows([seed, 5], 7), seed) for seed, name in enumerate(both)}
    messages = {"terms": terms.encode()}
    servers = server_of(terms, 0), server_of(terms, 1)
    for name, shares in sent.items():
        messages[f"public of {name}"] = shares.public
        for server in servers:
            messages[f"own of {name} to server {server.party}"] = shares.to[server.party]
            server.accept(name, shares.to[server.party])
    lists = [server.close() for server in servers]
    receipts = [server.reduce(lists[1 - server.party]) for server in servers]
    for server in servers:
        server.agree(receipts[1 - server.party])
    add_all(servers, sent)
    for party, server in enumerate(servers):
        messages[f"list of server {party}"] = lists[party]
        messages[f"receipt of server {party}"] = receipts[party]
        messages[f"share of server {party}"] = b"".join(server.share())
    assert_golden("whole-sum", messages)
