"""Attack: somebody copies a device's token, and uses it after its owner has reported it.

Round tokens that the thief got in the meantime must end as well. A service without a deny list is
the planted hole: there the thief goes on until the token expires.
"""

import time

import pytest

from keyhole.device.device import Device
from keyhole.errors import AccessError, MediaTypeError
from keyhole.service.access import Access, DenyList, Keyring
from keyhole.wire.sockets import Retry
from tests.service.small_service import small_service

RING = Keyring((b"k" * 32,))


def steal(directory, is_guarded):
    """What a thief still gets once the token that it holds has been denied."""
    seconds, denied = iter(range(10**6)), directory / "deny"
    denied.touch()
    # Of this clock every look is a second later: the list is looked at with each request.
    listed = DenyList(denied, clock=lambda: float(next(seconds))) if is_guarded else None
    stolen = RING.issue("device", "phone", now=time.time(), seconds=600.0)
    with small_service(directory / "rounds", access=Access(RING, denied=listed)) as service:
        service.publish()
        with Device(service.url, token=stolen, retry=Retry(attempts=1)) as thief:
            told = thief.check_in()  # before anybody knows
            denied.write_text(RING.verify(stolen.encode(), time.time()).id)  # the service runs on
            sends = {"token": told.token, "limit": 1024, "content_type": "text/plain"}
            path = f"/v1/rounds/{told.round}/updates"
            acts = {
                "a round": thief.check_in,
                "an update": lambda: thief.client.send(path, b"", **sends),
            }
            return [name for name, act in acts.items() if is_let_in(act)]


def is_let_in(act):
    try:
        act()
    except AccessError:
        return False
    except MediaTypeError:  # what is refused is what was sent, not the sender
        return True
    return True


def test_a_stolen_token_is_worth_nothing_once_its_id_is_denied(tmp_path):
    assert steal(tmp_path, is_guarded=True) == []


def test_without_a_deny_list_the_thief_goes_on(tmp_path):
    assert steal(tmp_path, is_guarded=False) == ["a round", "an update"]


def test_a_deny_list_does_not_wait_for_a_restart(tmp_path):
    """The same list, looked at again a second later by the clock of the system."""
    clock, path = [0.0], tmp_path / "deny"
    path.touch()
    listed = DenyList(path, clock=lambda: clock[0])
    path.write_text("a" * 32)
    assert "a" * 32 not in listed
    clock[0] += 1.0
    assert "a" * 32 in listed
    token = RING.issue("device", "p", now=0.0, seconds=60.0, token_id="a" * 32)
    with pytest.raises(AccessError, match="revoked"):
        Access(RING, denied=listed).device({b"authorization": b"Bearer " + token.encode()}, 1.0)
