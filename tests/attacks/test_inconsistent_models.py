"""Attack: everybody but one device is given a bias of -1e6, so that the sum is the victim's update.

The model has a rectifier: below zero it learns nothing. A slice service that alters the broadcast
part for all others makes their updates zero, and whoever adds up 8 updates reads one.
"""

import numpy as np
import pytest

import keyhole as kh
from keyhole.errors import DamageError
from tests.attacks.lying_service import believing, lying
from tests.service.small_service import small_service

WORDS, COHORT, VICTIM = 20, 8, 3
LIKE = {"w": np.zeros((WORDS, 4), np.float32), "b": np.zeros(4, np.float32)}
LAYOUT = kh.Layout.of(LIKE, kh.Cut(kh.KeySpace("word", WORDS), {"w": 0}))
EVERYONE = next(i for i, part in enumerate(LAYOUT.parts) if not part.product.factors)


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with small_service(tmp_path_factory.mktemp("rounds")) as made:
        yield made


def flood(records):
    """The bias, as float32."""
    records.view(np.float32)[:] = -1e6
    return records


def train(model):
    """The update of one step: zero where the rectifier is."""
    is_active = model["w"].sum(0) + model["b"] + 10 > 0
    step = np.where(is_active, np.float32(1), np.float32(0))
    return {"w": np.ones_like(model["w"]) * step, "b": step}


def gather(service, round_id, has_own_tree):
    """What each device sends; None where it refused what it was given."""
    sent = []
    for client in range(COHORT):
        keys = {"word": [client, client + 5]}
        with service.device(name=f"phone-{client}") as device:
            device.known(round_id)
            try:
                if client == VICTIM:
                    model = device.fetch(round_id, keys).model
                else:
                    with lying(service, EVERYONE, flood, has_own_tree):
                        model = device.fetch(round_id, keys).model
            except DamageError:
                sent.append(None)
                continue
        sent.append((keys["word"], train(model)))
    return sent


def total(sent):
    """The sum of all updates, as honest aggregators open it."""
    added = np.zeros((WORDS, 4), np.float32)
    for keys, update in filter(None, sent):
        added[keys] += update["w"]
    return added


@pytest.mark.parametrize("has_own_tree", [False, True])
def test_devices_that_compare_nothing_give_away_one_update(service, monkeypatch, has_own_tree):
    state = service.publish(LAYOUT, seed=1)
    believing(monkeypatch)
    sent = gather(service, state.published.id, has_own_tree)
    assert all(sent)
    keys, update = sent[VICTIM]
    assert update["w"].any()
    added = total(sent)
    np.testing.assert_array_equal(added[keys], update["w"])  # exactly, its keys included
    assert not np.delete(added, keys, axis=0).any()


@pytest.mark.parametrize("has_own_tree", [False, True])
def test_devices_that_verify_train_on_no_other_model(service, has_own_tree):
    state = service.publish(LAYOUT, seed=1)
    sent = gather(service, state.published.id, has_own_tree)
    assert sent[VICTIM] is not None
    # Nobody but the attacker's own devices would take the bias: all others leave the round.
    assert [client for client, each in enumerate(sent) if each is None] == [
        client for client in range(COHORT) if client != VICTIM
    ]
