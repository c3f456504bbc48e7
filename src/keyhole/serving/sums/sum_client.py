"""A trainer's line to one aggregator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import msgspec

from keyhole.errors import DamageError, MalformedError, ServiceError
from keyhole.private.secure_sum.whole_messages import Share, read_share, share_bytes
from keyhole.private.secure_sum.whole_terms import WholeTerms
from keyhole.serving.device.client import Client
from keyhole.serving.sums.messages import Closing, Opening, Summaries, SumStatus, read_message

__all__ = ["SumClient"]

T = TypeVar("T")

_JSON = "application/json"
_MOST_MESSAGE = 256 << 20  # bytes of a status: names of a million devices fit


class SumClient:
    """Asks one aggregator; every question may be asked twice.

    Args:
        client: of its service.
        token: of the trainer there, from its operator.
        party: which of both it is.
    """

    def __init__(self, client: Client, token: str, party: int) -> None:
        self._client, self._token, self.party = client, token, party

    def __repr__(self) -> str:
        """Without the token."""
        return f"SumClient(party {self.party}, {self._client!r})"

    def close(self) -> None:
        """Closes connections."""
        self._client.close()

    def rounds(self) -> list[str]:
        """The rounds of this trainer's sums that are there."""
        got = self._client.get("/v1/sums", token=self._token, most=_MOST_MESSAGE)
        return _read(got.body, Summaries).rounds

    def open(self, round_id: str, terms: WholeTerms, cohort: Sequence[str]) -> None:
        """Opens a sum.

        Raises:
            RequestError: the aggregator refuses, by kind.
            ServiceError: no usable answer.
        """
        opening = Opening(self.party, terms.encode(), list(cohort))
        self._post(f"/v1/sums/{round_id}", msgspec.json.encode(opening))

    def status(self, round_id: str) -> SumStatus:
        """How far a sum is, asked once.

        Raises:
            ServiceError: no answer now.
        """
        path = f"/v1/sums/{round_id}"
        got = self._client.exchange("GET", path, headers={}, token=self._token, most=_MOST_MESSAGE)
        if got.problem:
            raise ServiceError(
                f"aggregator {self.party} gives no usable answer",
                got=got.problem,
                allowed="its status",
                fix="check that it runs; the round goes on when it does",
            )
        return _read(got.body, SumStatus)

    def stop(self, round_id: str) -> SumStatus:
        """No more shares."""
        return _read(self._post(f"/v1/sums/{round_id}/stop", b""), SumStatus)

    def add_up(self, round_id: str, taken: Sequence[str]) -> SumStatus:
        """Says whose updates count; `status` tells when they are added up."""
        body = msgspec.json.encode(Closing(list(taken)))
        return _read(self._post(f"/v1/sums/{round_id}/close", body), SumStatus)

    def share(self, round_id: str, terms: WholeTerms) -> Share:
        """Its share of a sum that is ready; asked again, the same.

        Raises:
            DamageError: what arrives is not a share of this sum, time and again.
        """

        found: list[Share] = []

        def check(body: memoryview) -> None:
            try:
                found.append(read_share(terms, self.party, body))
            except MalformedError as error:
                raise DamageError(
                    "a share was damaged",
                    got=f"{len(body)} bytes",
                    allowed="the share of the sum",
                    fix="fetch it again",
                ) from error

        path, most = f"/v1/sums/{round_id}/share", share_bytes(terms)
        self._client.get(path, token=self._token, most=most, check=check)
        return found[0]

    def forget(self, round_id: str) -> None:
        """Removes a sum there."""
        self._post(f"/v1/sums/{round_id}/forget", b"")

    def _post(self, path: str, body: bytes) -> memoryview:
        got = self._client.send(
            path, body, token=self._token, most=_MOST_MESSAGE, content_type=_JSON
        )
        return got.body


def _read(body: memoryview, kind: type[T]) -> T:
    try:
        return read_message(body, kind)
    except MalformedError as error:
        raise ServiceError(
            "an aggregator says something that makes no sense",
            got=f"{len(body)} bytes",
            allowed="messages as docs/wire.md describes them",
            fix="check the URL, and that both sides are of one version",
        ) from error
