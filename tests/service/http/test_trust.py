"""What the operator of a service is told about those who ask: counts, and never a key or a name."""

import http.client
import json
import logging
import re
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import numpy as np
import pytest

import keyhole as kh
from keyhole.delivery.sources import sources_of
from keyhole.server.optimizers import SGD
from keyhole.server.state import ServerState
from keyhole.service.access import Access, Keyring
from keyhole.service.app import App
from keyhole.service.on_demand import OnDemandRounds
from keyhole.service.publishing import Publisher
from keyhole.service.reading import RoundsDirectory
from keyhole.service.spool import UpdateSpool
from keyhole.service.transport import serving
from keyhole.wire import messages as wire
from keyhole.wire.assignment import Pace, admit
from keyhole.wire.manifest import digest_of
from tests.helpers import LONG

KEY, NUM_KEYS, DEVICE = 48_611, 50_000, "the-phone-in-question"
OUTSIDE = 77_377
RING = Keyring((b"k" * 32,))
VALUE = {"w": np.arange(NUM_KEYS, dtype=np.float32), "b": np.ones(2, np.float32)}
LAYOUT = kh.Layout.of(VALUE, kh.Cut(kh.KeySpace("word", NUM_KEYS), {"w": 0}))


class Failing:
    """A source whose error names the keys."""

    def __init__(self, source):
        self.records = source.records

    def read(self, keys):
        raise ValueError(f"cannot compute {keys}")


@contextmanager
def rounds_of(kind, directory):
    state = ServerState.dense(LAYOUT, VALUE, SGD(1.0))
    if kind == "pregenerated":
        with Publisher(directory) as publisher:
            publisher.publish_state(state, number=0)
        yield RoundsDirectory(directory)
        return
    sources = sources_of(state)
    if kind == "failing":
        sources = [Failing(source) for source in sources]
    with ThreadPoolExecutor(1) as pool:
        rounds = OnDemandRounds(max_bytes=1 << 22, executor=pool)
        rounds.publish(sources, LAYOUT, number=0)
        yield rounds


@contextmanager
def service(kind, directory):
    """Serves over sockets; gives `ask(method, path, body, token) -> (status, body)`."""
    with rounds_of(kind, directory) as rounds:
        app = App(
            rounds,
            access=Access(RING, reads_need_token=True),
            spool=UpdateSpool(directory / "updates"),
            admit=partial(admit, pace=Pace(), uniform=lambda: 0.5),
        )
        with serving(app) as url:

            def ask(method, path, body=None, token=None):
                connection = http.client.HTTPConnection(url.split("//")[1], timeout=LONG)
                headers = {"content-type": "application/octet-stream"}
                if token is not None:
                    headers["authorization"] = f"Bearer {token}"
                connection.request(method, path, body, headers)
                answer = connection.getresponse()
                found = answer.status, answer.read()
                connection.close()
                return found

            ask.metrics = lambda: app.metrics.page().decode()
            yield ask


def take_part(ask):
    """Everything a device does, right and wrong; returns the statuses."""
    token = RING.issue("device", DEVICE, now=time.time(), seconds=60.0)
    status, said = ask("POST", "/v1/checkin", token=token)
    told = json.loads(said)
    base, token = f"/v1/rounds/{told['round']}", told["token"]
    update = {"w": np.ones(1, np.float32), "b": np.ones(2, np.float32)}
    keys = {"word": LAYOUT.spaces[0].keys([KEY])}
    sent = wire.encode_update(LAYOUT, update, keys, digest_of(told["round"]))
    asked = [wire.encode_query([wire.Ask(1, np.array([key]))]) for key in (KEY, OUTSIDE)]
    return [
        status,
        ask("POST", f"{base}/slices", asked[0], token)[0],
        ask("POST", f"{base}/slices", asked[1], token)[0],
        ask("POST", f"{base}/slices", asked[0])[0],
        ask("GET", f"{base}/tables/1/slices/{KEY}", None, token)[0],
        ask("GET", f"{base}/tables/1/slices/{OUTSIDE}", None, token)[0],
        ask("GET", f"/{DEVICE}/{KEY}", None, token)[0],
        ask("POST", f"{base}/updates", sent, token)[0],
        ask("POST", f"{base}/updates", sent[:-1], token)[0],
    ]


def logged(caplog):
    """What everything but numba logs: that tells at length what it compiles, on a cold cache."""
    records = (each for each in caplog.records if each.name.partition(".")[0] != "numba")
    return [record.getMessage() for record in records]


def assert_tells_nothing(text):
    for secret in (KEY, OUTSIDE, DEVICE):
        assert str(secret) not in text


@pytest.mark.parametrize("kind", ["pregenerated", "on demand"])
def test_nothing_is_logged_and_metrics_hold_no_key_or_device(kind, tmp_path, caplog, capfd):
    caplog.set_level(logging.DEBUG)
    with service(kind, tmp_path) as ask:
        assert take_part(ask) == [200, 200, 400, 401, 200, 404, 404, 201, 400]
        page = ask.metrics()
    assert logged(caplog) == []
    assert capfd.readouterr() == ("", "")
    assert "keyhole_keys_total 2.0" in page
    # Sums of seconds have 16 digits, among which those of a key may stand.
    assert_tells_nothing(re.sub(r"(?m)^(keyhole_request_seconds_sum\S+) .*$", r"\1", page))


def test_a_select_function_that_fails_tells_no_key_through_the_service(tmp_path, caplog, capfd):
    caplog.set_level(logging.DEBUG)
    with service("failing", tmp_path) as ask:
        assert take_part(ask)[1] == 500
        page = ask.metrics()
    assert set(logged(caplog)) == {
        "KeyholeError on route slices",
        "KeyholeError on route slice",
    }
    assert_tells_nothing(page + "".join(logged(caplog)) + "".join(capfd.readouterr()))
