"""Attack: devices are given different manifests: under two names, or under one that collides.

Who names the round at check-in could name each device another one. Names of 64 bits also fell to a
collision: two manifests of one name take 2^32 hashes, an hour of one machine.
"""

from hashlib import sha256

import pytest
from msgspec.structs import replace

from keyhole.errors import AccessError, DamageError
from keyhole.wire.manifest import decode_manifest, encode_manifest, name_round
from keyhole.wire.signing import SigningKey
from tests.helpers import LAYOUTS
from tests.service.scripted import answer, scripted
from tests.service.small_service import small_service

LAYOUT = LAYOUTS["rows"]


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with small_service(tmp_path_factory.mktemp("rounds")) as made:
        yield made


def sign(service, monkeypatch, key):
    monkeypatch.setattr(service.publisher, "_signing_key", key)


def test_a_device_that_pins_nothing_takes_what_a_service_publishes_itself(service, monkeypatch):
    """The hole: no key."""
    trainer, attacker = SigningKey.fresh(), SigningKey.fresh()
    for key in (trainer, attacker, None):
        sign(service, monkeypatch, key)
        state = service.publish(LAYOUT, seed=1)
        with service.device() as device:
            assert device.manifest(state.published.id) == state.published.manifest


@pytest.mark.parametrize("by", ["attacker", "nobody"])
def test_a_device_that_pins_the_trainer_takes_nobody_elses_round(service, monkeypatch, by):
    trainer = SigningKey.fresh()
    sign(service, monkeypatch, trainer)
    honest = service.publish(LAYOUT, seed=1)
    sign(service, monkeypatch, SigningKey.fresh() if by == "attacker" else None)
    other = service.publish(LAYOUT, seed=2)
    with service.device(trainer_key=trainer.public) as device:
        assert device.manifest(honest.published.id) == honest.published.manifest
        with pytest.raises(AccessError, match="not the trainer's"):
            device.fetch(other.published.id, {"row": [1]})


def test_the_signature_of_one_round_is_none_of_another(service, monkeypatch):
    trainer = SigningKey.fresh()
    sign(service, monkeypatch, trainer)
    rounds = [service.publish(LAYOUT, seed=seed).published for seed in (1, 2)]
    signature = trainer.sign(rounds[0].id).hex()
    with scripted(answer(200, rounds[1].encoded, keyhole_signature=signature)) as script:
        url = f"http://127.0.0.1:{script.port}"
        device = service.device(url, trainer_key=trainer.public)
        with device, pytest.raises(AccessError, match="another key or manifest"):
            device.manifest(rounds[1].id)


def colliding(encoded, digits, tries):
    """Two manifests of one name: settings are free, so is a nonce in them. Birthdays."""
    seen, manifest = {}, decode_manifest(encoded)
    prefix, suffix = encode_manifest(replace(manifest, settings={"nonce": "@"})).split(b"@")
    for nonce in range(tries):
        made = prefix + str(nonce).encode() + suffix
        name = sha256(made).hexdigest()[:digits]
        if name in seen:
            return prefix + str(seen[name]).encode() + suffix, made
        seen[name] = nonce
    return None


def test_short_names_collide_and_whole_digests_do_not(service, monkeypatch):
    """A name of b bits takes 2^(b/2) hashes: 2^16 for 32 bits here, 2^32 for the 64 of old."""
    encoded = service.publish(LAYOUT, seed=3).published.encoded
    tries = 1 << 19
    one, other = colliding(encoded, 8, tries)
    assert one != other
    assert decode_manifest(one).settings != decode_manifest(other).settings
    assert colliding(encoded, 16, 1 << 12) is None  # 2^32 would do
    number = decode_manifest(one).number
    assert name_round(one, number) != name_round(other, number)
    with scripted(*[answer(200, other)] * 4) as script:
        device = service.device(f"http://127.0.0.1:{script.port}")
        with device, pytest.raises(DamageError, match="the round is not named after"):
            device.manifest(name_round(one, number))
    short = name_round(one, number)  # the planted hole: devices compare 32 bits of a name
    monkeypatch.setattr(
        "keyhole.device.device.name_round",
        lambda body, n: short if sha256(body).hexdigest()[:8] == short.split("-")[1][:8] else "",
    )
    with scripted(answer(200, other)) as script:
        fooled = service.device(f"http://127.0.0.1:{script.port}")
        assert fooled.manifest(short) == decode_manifest(other)
        fooled.close()


def test_a_key_does_not_print_itself():
    key = SigningKey.fresh()
    assert key.encode().strip() not in repr(key)
