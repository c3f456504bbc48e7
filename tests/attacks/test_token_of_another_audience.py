"""Attack: an aggregator, or a relay, uses the token that a device showed to it at another service.

All of them accept tokens of one key here, as where an operator gave one key to all. A check that
does not look at the audience is the planted hole: there one token opens every door.
"""

import time

import pytest

from keyhole.device.device import Device
from keyhole.errors import MediaTypeError, NotAdmittedError
from keyhole.service.access import Access, Keyring
from keyhole.wire.sockets import Retry
from tests.service.small_service import small_service

RING = Keyring((b"k" * 32,))
AUDIENCES = ("slices", "aggregator", "relay")


def doors(token):
    """The kinds of service that let a token in."""
    header = {b"authorization": b"Bearer " + token.encode()}
    found = set()
    for audience in AUDIENCES:
        try:
            Access(RING, audience=audience).identify(header, time.time())
        except NotAdmittedError:
            continue
        found.add(audience)
    return found


def issued(audience):
    return RING.issue("device", "phone", now=time.time(), seconds=60.0, audience=audience)


@pytest.mark.parametrize("audience", AUDIENCES)
def test_a_token_opens_one_kind_of_service(audience):
    assert doors(issued(audience)) == {audience}


def test_a_check_that_does_not_look_at_the_audience_opens_all(monkeypatch):
    def identify(self, headers, now):  # as it was before tokens had an audience
        return self.keyring.verify(headers[b"authorization"].partition(b" ")[2], now)

    monkeypatch.setattr(Access, "identify", identify)
    assert doors(issued("aggregator")) == set(AUDIENCES)


def test_what_an_aggregator_is_shown_sends_no_update_in_the_clear(tmp_path):
    with small_service(tmp_path, access=Access(RING)) as service:
        service.publish()
        with Device(service.url, token=issued("slices"), retry=Retry(attempts=1)) as device:
            told = device.check_in()
            path = f"/v1/rounds/{told.round}/updates"
            ring = RING.for_aggregator(0)
            assert ring.verify(told.sum_tokens[0].encode(), time.time()).audience == "aggregator"
            shown = RING.issue(  # as if it had the service's own key
                *("round", "phone"), now=time.time(), seconds=60.0, audience="aggregator",
                round_id=told.round,
            )  # fmt: skip
            for token, error in ((shown, NotAdmittedError), (told.token, MediaTypeError)):
                sends = {"token": token, "limit": 1024, "content_type": "text/plain"}
                with pytest.raises(error):
                    device.client.send(path, b"", **sends)
