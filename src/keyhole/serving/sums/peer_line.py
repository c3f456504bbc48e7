"""An aggregator's line to the other one: lists, and what devices sent for both.

It shows a token that both have the key of, made anew for each request, and speaks TLS like all
services. The other one is believed as far as the protocol goes: whatever it says is compared.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from keyhole.errors import NotFoundError, RequestError, ServiceError, TooLateError
from keyhole.serving.device.client import Client
from keyhole.serving.service.access import Keyring
from keyhole.serving.sums.messages import peer_name

__all__ = ["PeerLine", "PeerOverError"]

_TOKEN_SECONDS = 120.0


class PeerOverError(Exception):
    """The other aggregator has given the sum up, or never had it."""


class PeerLine:
    """Asks the other aggregator.

    Args:
        client: of its service; it should try once, since whoever asks comes back.
        keyring: that both aggregators have.
        party: which of both this one is.
        clock: unix seconds, for tokens.
    """

    def __init__(
        self, client: Client, keyring: Keyring, party: int, clock: Callable[[], float] = time.time
    ) -> None:
        self._client, self._keyring, self._clock = client, keyring, clock
        self._name = peer_name(party)

    def close(self) -> None:
        """Closes connections."""
        self._client.close()

    def listed(self, round_id: str, most: int) -> bytes:
        """Its list, once it has closed the sum."""
        return self._get(f"/v1/sums/{round_id}/list", most)

    def agreed(self, round_id: str, most: int) -> bytes:
        """Whom it will add, once it has our list."""
        return self._get(f"/v1/sums/{round_id}/agreed", most)

    def public(self, round_id: str, device: str, most: int) -> bytes:
        """The public message of a device; of the first aggregator."""
        return self._get(f"/v1/sums/{round_id}/publics/{device}", most)

    def _get(self, path: str, most: int) -> bytes:
        """One exchange.

        Raises:
            ServiceError: no usable answer now; asking again may help.
            PeerOverError: it has given the sum up, or never had it.
        """
        now = self._clock()
        token = self._keyring.issue("device", self._name, now=now, seconds=_TOKEN_SECONDS)
        ask = partial(self._client.exchange, "GET", path, headers={}, token=token, most=most)
        try:
            got = ask()
        except (NotFoundError, TooLateError) as error:
            raise PeerOverError from error
        except RequestError as error:
            raise _away(f"a refusal, {type(error).__name__}") from error
        if got.problem:
            raise _away(got.problem)
        return bytes(got.body)


def _away(got: str) -> ServiceError:
    return ServiceError(
        "the other aggregator gives no usable answer",
        got=got,
        allowed="answers as docs/wire.md describes them",
        fix="check that it runs, and --peer, --peer-key and --peer-ca; the sum goes on by itself",
    )
