"""Everybody but one is given a model on which nothing can be learned: their updates are zero.

A slice service that gives all others a bias of -1e6 makes the sum of two honest aggregators the
victim's update, exactly, its keys included. Slices are bound to the manifest, so another model has
another manifest; what this page attacks is the sum: the aggregators add only what was made from the
manifest that the sum was opened for.
"""

from hashlib import sha256

import numpy as np

from keyhole import tree
from keyhole.aggregation.exchange import client_of, combine, facts_of
from keyhole.aggregation.shares import SumFacts
from keyhole.aggregation.two_servers.method import TwoServers
from keyhole.errors import StaleError
from keyhole.service.sum_services import SumServices
from keyhole.wire.assignment import device_name
from keyhole.wire.manifest import digest_of, name_round
from tests.service.sums.aggregators import Pair, aggregators
from tests.service.sums.private_run import LAYOUT, MODEL, ROW, SALT, make_plan

CLIENTS = 6
VICTIM = 0
BAD_MODEL = {**MODEL, "bias": np.full(3, -1e6, np.float32)}


def train(model, client):
    """A step that learns nothing where the bias drowns it: as a saturated unit has no gradient."""
    scale = np.float32(model["bias"].min() > -1e5)
    rng = np.random.default_rng(client)
    submodel = LAYOUT.select(model, {"row": ROW.keys(keys_of(client))})
    return tree.map_leaves(
        lambda leaf: scale * (rng.integers(-4096, 4096, leaf.shape) / 1024).astype(np.float32),
        submodel,
    )


def keys_of(client):
    return np.sort(np.random.default_rng(client).choice(ROW.num_keys, 4, replace=False))


def published(model):
    """The name of a round: the digest of its manifest, which holds the digest of every table."""
    text = b"".join(leaf.tobytes() for leaf in tree.flatten(model).values())
    return name_round(sha256(text).digest(), 0)


GOOD, BAD = published(MODEL), published(BAD_MODEL)


def attack(pair: Pair):
    """The victim trains on the good model, all others on the bad one; returns who is refused, and
    the sum if there is one."""
    inbox = SumServices(pair.trainer(0), pair.trainer(1), salt=SALT)
    inbox.open(0, range(CLIENTS), LAYOUT, make_plan(aggregate=TwoServers()))
    inbox.begin(GOOD)
    params, aggregation, refused = inbox._now().params, TwoServers(), []
    for client in range(CLIENTS):
        is_victim = client == VICTIM
        model, at = (MODEL, GOOD) if is_victim else (BAD_MODEL, BAD)
        sender = client_of(aggregation, params, digest_of(at), LAYOUT)
        made = sender.shard(train(model, client), {"row": ROW.keys(keys_of(client))})
        try:
            for party, body in enumerate(made.bodies):
                pair.send(party, GOOD, device_name(client), body)
        except StaleError:
            refused.append(client)
    pair.close(GOOD)
    (done, _) = pair.wait(GOOD)
    if done.phase == "failed":
        return refused, done.failure.kind, None
    facts = facts_of(aggregation, params, digest_of(GOOD))
    shares = [pair.trainer(party).share(GOOD, facts) for party in (0, 1)]
    return refused, None, combine(aggregation, params, shares)


def test_devices_that_trained_on_another_model_do_not_get_into_the_sum(tmp_path):
    with aggregators(tmp_path) as pair:
        refused, why, total = attack(pair)
    assert refused == [client for client in range(CLIENTS) if client != VICTIM]
    assert (why, total) == ("ThresholdError", None)


def test_without_the_manifest_in_messages_the_sum_is_the_victims_update(tmp_path, monkeypatch):
    """The hole: the digest of a message covers the params alone."""
    hole = property(lambda facts: sha256(facts.params).digest())
    monkeypatch.setattr(SumFacts, "digest", hole)
    with aggregators(tmp_path) as pair:
        refused, _, total = attack(pair)
    assert refused == []
    update = train(MODEL, VICTIM)
    bias, rows = total
    np.testing.assert_array_equal(bias.rows.ravel(), update["bias"])
    (touched,) = np.nonzero(rows.rows.any(axis=1))
    np.testing.assert_array_equal(rows.keys[touched], keys_of(VICTIM))
    np.testing.assert_array_equal(rows.rows[touched], update["w"])


def test_the_attack_needs_updates_of_zero(tmp_path):
    """Negative control: on one model for all, the sum is nobody's alone."""
    for client in range(1, CLIENTS):
        update = train(MODEL, client)
        assert any(leaf.any() for leaf in tree.flatten(update).values())
        assert not any(leaf.any() for leaf in tree.flatten(train(BAD_MODEL, client)).values())


def test_the_digest_of_a_message_is_that_of_params_and_manifest():
    params = b"params"
    facts = SumFacts(
        params=params,
        round=bytes(16),
        min_clients=2,
        max_clients=2,
        public_bytes=0,
        own_bytes=(0, 0),
        share_bytes=0,
        model=digest_of(GOOD),
    )
    assert facts.digest == sha256(params + digest_of(GOOD)).digest()
