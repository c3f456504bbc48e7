"""Attack: a service gives out a round that the trainer signed long ago, under a number of its own.

The signature is of the manifest, and holds for ever: what tells an old round from a new one is its
number, which the manifest says. Devices would train an old model, with the random numbers that they
had then. The planted hole is a device that takes the number in the name for the round's.
"""

import json

import pytest

from keyhole.device import device as device_module
from keyhole.errors import ViolationError
from keyhole.service.transport import serving
from keyhole.wire.manifest import decode_manifest
from tests.helpers import LAYOUTS
from tests.service.small_service import small_service

OLD, NEW = 3, 9


class Renaming:
    """A service whose round OLD is called NEW."""

    def __init__(self, app, old):
        self.app, self.old, self.new = app, old, f"{NEW}-{old.partition('-')[2]}"

    def __getattr__(self, name):
        return getattr(self.app, name)

    async def __call__(self, scope, receive, send):
        if scope["type"] == "http":
            path = scope["path"].replace(self.new, self.old)
            scope = {**scope, "path": path, "raw_path": path.encode()}
        whole = []

        async def renamed(message):
            whole.append(message)
            if message["type"] != "http.response.body" or message.get("more_body"):
                return
            head, *bodies = whole
            body = b"".join(each["body"] for each in bodies)
            if scope["path"].endswith(("/checkin", "/current")):
                told = json.loads(body)
                body = json.dumps({**told, "round": self.new, "number": NEW}).encode()
            kept = [pair for pair in head["headers"] if pair[0] != b"content-length"]
            kept.append((b"content-length", b"%d" % len(body)))
            await send({**head, "headers": kept})
            await send({"type": "http.response.body", "body": body})

        await self.app(scope, receive, renamed)


@pytest.fixture
def renamed(tmp_path):
    with small_service(tmp_path) as service:
        old = service.publish(LAYOUTS["rows"], number=OLD).published.id
        with serving(Renaming(service.app, old)) as url:
            yield service, url


def fetch(service, url):
    with service.device(url, trainer_key=service.trainer.public) as device:
        told = device.check_in()
        assert told.number == NEW
        return device.fetch(told, {"row": [5]})


def test_a_device_refuses_it(renamed):
    with pytest.raises(ViolationError, match="got round 3 as round 9"):
        fetch(*renamed)


def test_a_device_that_believes_the_name_takes_it(renamed, monkeypatch):
    monkeypatch.setattr(device_module, "decode_round", lambda data, _: decode_manifest(data))
    assert len(fetch(*renamed).keys["row"]) == 1
