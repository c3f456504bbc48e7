"""The relay's line to its one gateway: one connection, and nothing on it that tells who asks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from keyhole.errors import BusyError, KeyholeError, MalformedError, RequestError, ServiceError
from keyhole.private.oblivious.key_config import decode_configs
from keyhole.serving.device.client import Client, Received
from keyhole.serving.relay.batches import REQUESTS_TYPE, decode_answers, encode_requests
from keyhole.serving.relay.gateway_routes import GATEWAY_PATH, KEYS_PATH

__all__ = ["MOST_CONFIG", "GatewayLine"]

MOST_CONFIG = 1 << 16
"""Bytes of a list of key configurations."""

_RESTED = 5.0  # seconds after which a connection is made anew: the gateway may have closed it
_KNOWN_FOR = 5.0  # seconds for which a key configuration is passed on without asking again

_T = TypeVar("_T")


class GatewayLine:
    """Carries batches to the gateway.

    A batch is sent once: whether a request was processed cannot be told from a connection that
    breaks (RFC 9458, section 6.5). What goes with it are the content type, the length and, where
    reading takes a token, the relay's own.

    Args:
        client: of the gateway.
        token: of the relay; None where reading is free for all.
        most_answer: bytes of the answers to one batch.
    """

    def __init__(self, client: Client, token: str | None, most_answer: int) -> None:
        self._client, self._token, self._most = client, token, most_answer
        # One thread, one connection: what the gateway sees is one stream of batches.
        self._pool = ThreadPoolExecutor(1, "keyhole relay")
        self._used = self._asked = -1e9
        self._configs = b""

    def close(self) -> None:
        """Closes the connection, once what is under way is over."""
        self._pool.shutdown()
        self._client.close()

    async def forward(self, sealed: list[bytes]) -> list[bytes]:
        """Returns the answer to each request, empty where the gateway could not open it.

        Raises:
            BusyError: the gateway has too much under way.
            ServiceError: it is away, refuses the relay, or makes no sense.
        """
        body = encode_requests(sealed)
        got = await self._in_thread(partial(self._post, body))
        try:
            return decode_answers(bytes(got.body), len(sealed))
        except MalformedError as error:
            raise _no_answer("an answer that makes no sense") from error

    async def configs(self) -> bytes:
        """The gateway's key configuration, as it gives it.

        Raises:
            ServiceError: it is away, or this is none.
        """
        return await self._in_thread(self._get_configs)

    def _post(self, body: bytes) -> Received:
        headers = {"content-type": REQUESTS_TYPE}
        return self._exchange(
            partial(self._client.exchange, "POST", GATEWAY_PATH, body, headers=headers)
        )

    def _get_configs(self) -> bytes:
        if time.monotonic() - self._asked > _KNOWN_FOR:
            got = self._exchange(partial(self._client.exchange, "GET", KEYS_PATH, headers={}))
            try:
                decode_configs(bytes(got.body))
            except MalformedError as error:
                raise _no_answer("no key configuration") from error
            self._configs, self._asked = bytes(got.body), time.monotonic()
        return self._configs

    def _exchange(self, ask: Callable[..., Received]) -> Received:
        """One exchange, whose failures are the gateway's and not the client's."""
        if time.monotonic() - self._used > _RESTED:
            self._client.close()
        try:
            got = ask(token=self._token, most=self._most, may_repeat=False)
        except RequestError as error:
            raise _no_answer(f"a refusal, {type(error).__name__}") from error
        finally:
            self._used = time.monotonic()
        if got.status in (429, 503):
            raise BusyError(
                "the gateway has too much under way",
                got=f"status {got.status}",
                allowed="fewer requests",
                fix="come back when the answer says",
            )
        if got.problem:
            raise _no_answer(got.problem)
        return got

    async def _in_thread(self, work: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)


def _no_answer(got: str) -> KeyholeError:
    return ServiceError(
        "the gateway gives no usable answer",
        got=got,
        allowed="answers as docs/wire.md describes them",
        fix="try again later; the operator of the relay may check --gateway",
    )
