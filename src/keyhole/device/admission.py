"""Takes part in a round without a name: has tokens signed that the signer cannot read.

Hidden from a service that is shown one: which device it is, if the key is the same for all devices;
so it is asked for at every service that takes tokens, and must be equal. One service alone says
both: there it may give each device a key of its own, and then knows it. Not hidden: the address.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from keyhole.crypto.blind import SIGNATURE_BYTES, Blinded, BlindPublic
from keyhole.device.device import Assignment, Device
from keyhole.errors import MalformedError, ServiceError
from keyhole.wire.http import OCTETS
from keyhole.wire.private import MAX_CONFIG, admission_path, blind_token, redeem_path

_MAX_MESSAGE = 1 << 16


class _Redeemed(msgspec.Struct, frozen=True):
    token: str


def signed_tokens(
    device: Device, round: Assignment, places: Sequence[str], takers: Sequence[Device]
) -> list[bytes]:
    """Returns a token for each place, signed by the coordinator, which `device` speaks to.

    Args:
        takers: lines to the services that will take them.

    Raises:
        ServiceError: they do not name one key, or what comes back is no signature.
    """
    path = admission_path(round.round)
    named = {bytes(each.client.get(path, limit=MAX_CONFIG).body) for each in (device, *takers)}
    if len(named) != 1:
        raise _refused(f"{len(named)} keys")
    key = BlindPublic.decode(named.pop())
    blinded: list[Blinded] = [blind_token(key, round.round, place) for place in places]
    body = b"".join([each.sent for each in blinded])
    options = {"token": round.token, "limit": len(body), "content_type": OCTETS}
    got = bytes(device.client.send(path, body, **options).body)  # type: ignore[arg-type]
    if len(got) != len(body):
        raise _refused(f"{len(got)} bytes of signatures")
    pieces = [got[at : at + SIGNATURE_BYTES] for at in range(0, len(got), SIGNATURE_BYTES)]
    try:
        return [one.message + one.finish(piece) for one, piece in zip(blinded, pieces, strict=True)]
    except MalformedError as error:
        raise _refused("answers that are no signatures") from error


def redeem(server: Device, round: Assignment, token: bytes) -> Assignment:
    """Changes a token at a server of private queries; returns how it knows the device there."""
    path = redeem_path(round.round)
    got = server.client.exchange(
        "POST",
        path,
        token,
        headers={"content-type": OCTETS},
        token=None,
        limit=_MAX_MESSAGE,
        may_repeat=False,
    )
    try:
        found = msgspec.json.decode(got.body, type=_Redeemed)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _refused(got.problem or "no token") from error
    return Assignment(round.round, round.number, found.token)


def _refused(got: str) -> ServiceError:
    return ServiceError(
        f"no token without a name: got {got}; expected one key of the round at all services, and "
        "signatures under it; check their addresses; nothing was asked for by name instead"
    )
