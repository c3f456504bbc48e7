"""Brings the closed sums of an aggregator to their end, together with the other aggregator.

Once a sum is closed, the aggregators exchange lists, compare receipts of what is left, and each
adds up its shares. What the other one says is believed as far as the protocol goes: it is compared.
One thread for each sum that is closing; one of them adds up at a time, so that memory holds one
table, and one more for each sum that waits for the counts of the other. It waits for the other
aggregator as long as that is away. What cannot be mended is written down, and nothing of the sum is
given out.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from traceback import extract_tb

import msgspec

from keyhole.aggregation.exchange import add_all, server_of, settle
from keyhole.aggregation.shares import (
    count_message_bytes,
    list_message_bytes,
    receipt_message_bytes,
)
from keyhole.aggregation.sum_server import SumServer
from keyhole.errors import (
    BudgetError,
    CohortError,
    KeyholeError,
    MismatchError,
    NotFoundError,
    ProtocolError,
    RequestError,
    ServiceError,
    TooLateError,
)
from keyhole.logs import tell
from keyhole.service.access import Keyring
from keyhole.service.sum_files import model_of
from keyhole.service.sums import HeldSum, Sums
from keyhole.wire.http import HttpClient
from keyhole.wire.manifest import number_of
from keyhole.wire.messages import Failure, peer_name

_TOKEN_SECONDS = 120.0
_FIRST_WAIT, _LONGEST_WAIT = 0.02, 2.0  # seconds between two questions to the other aggregator
_LOOK_EVERY = 0.5  # seconds between two looks for sums that are open for too long
_LOG = logging.getLogger("keyhole.service")


class PeerLine:
    """Asks the other aggregator, by a token that both have the key of, made again for each request.

    `client` should try once, since anyone who asks comes back; `clock` is in unix seconds.
    """

    def __init__(
        self,
        client: HttpClient,
        keyring: Keyring,
        party: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._client, self._keyring, self._clock = client, keyring, clock
        self._name = peer_name(party)

    def close(self) -> None:
        """Closes connections."""
        self._client.close()

    def get(self, round_id: str, what: str, limit: int) -> bytes:
        """Its `list` once it has closed a sum, its `receipt`, its share of the `counts`, or the
        public message of a device, `publics/NAME`.

        Raises:
            ServiceError: no usable answer now; asking again may help.
            MismatchError: it has given the sum up, or never had it.
        """
        now = self._clock()
        token = self._keyring.issue(
            "device", self._name, now=now, seconds=_TOKEN_SECONDS, audience="aggregator"
        )
        path = f"/v1/sums/{round_id}/{what}"
        try:
            got = self._client.exchange("GET", path, headers={}, token=token, limit=limit)
        except (NotFoundError, TooLateError) as error:
            raise MismatchError(
                "the other aggregator has given the sum up, or never had it: got a sum that is "
                "here alone; expected sums that both have; look at its status, and go on with the "
                "next round"
            ) from error
        except RequestError as error:
            raise _away(f"a refusal, {type(error).__name__}") from error
        if got.problem:
            raise _away(got.problem)
        return bytes(got.body)


def _away(got: str) -> ServiceError:
    return ServiceError(
        f"the other aggregator gives no usable answer: got {got}; expected answers as docs/wire.md "
        "describes them; check that it runs, and --peer, --peer-key and --peer-ca; the sum goes on "
        "by itself"
    )


class Finisher:
    """Brings closed sums to their end."""

    def __init__(self, sums: Sums, peer: PeerLine, clock: Callable[[], float]) -> None:
        self._sums, self._files, self._peer, self._clock = sums, sums.files, peer, clock
        self._stop, self._lock, self._adding = threading.Event(), threading.Lock(), threading.Lock()
        self._threads: dict[str, threading.Thread] = {}
        self._waiting: dict[str, str] = {}

    def resume(self) -> None:
        """Goes on with the sums that were closing when the process ended, and closes those that
        have been open for too long."""
        for round_id in self._files.rounds():
            self.start(round_id)
        threading.Thread(target=self._close_overdue, name="keyhole sums", daemon=True).start()

    def _close_overdue(self) -> None:
        while not self._stop.wait(_LOOK_EVERY):
            with suppress(OSError, KeyholeError):  # a disk that is full now: look again
                for round_id in self._sums.close_overdue(self._clock()):
                    self.start(round_id)

    def start(self, round_id: str) -> None:
        """Begins with a sum, unless it is under way or over."""
        with self._lock:
            running = self._threads.get(round_id)
            if (running and running.is_alive()) or self._sums.phase(round_id) != "closing":
                return
            # A daemon: anyone who ends the process need not wait, since all is in files.
            thread = threading.Thread(
                target=self._run, args=(round_id,), name="keyhole sum", daemon=True
            )
            self._threads = {r: t for r, t in self._threads.items() if t.is_alive()}
            self._threads[round_id] = thread
            thread.start()

    def waiting(self, round_id: str) -> str:
        """Returns what a sum waits for, in words without a name."""
        return self._waiting.get(round_id, "")

    def close(self) -> None:
        """Ends what is under way; it goes on when there is a `Finisher` again."""
        self._stop.set()
        for thread in list(self._threads.values()):
            thread.join()
        self._peer.close()

    def _run(self, round_id: str) -> None:
        wait = _FIRST_WAIT
        while not self._stop.is_set():
            try:
                self._finish(self._sums.held(round_id))
            except (ProtocolError, CohortError, BudgetError) as error:
                self._give_up(round_id, error)
            except NotFoundError:  # of an upload, or of the sum: then the trainer has forgotten it
                lost = MismatchError(
                    "what devices sent is not here any more: got a list without its messages; "
                    "expected all messages of the list; check the disk of this aggregator, and go "
                    "on with the next round"
                )
                self._give_up(round_id, lost)
            except Exception as error:  # noqa: BLE001 - a disk that is full, or our own mistake
                self._note(round_id, error)
                wait = min(_LONGEST_WAIT, 2 * wait)
                self._stop.wait(wait)
                continue
            self._waiting.pop(round_id, None)
            return

    def _finish(self, held: HeldSum) -> None:
        """One sum, from its closed list to a share on the disk."""
        server, round_id = self._opened(held), held.round
        asked, length = len(held.opening.cohort), server.facts.public_message_bytes
        limit = max(list_message_bytes(asked), receipt_message_bytes(asked))
        sides = settle(server)
        answer: bytes | None = None  # to what this one told
        with suppress(StopIteration):
            while True:
                kind, told = next(sides) if answer is None else sides.send(answer)
                self._keep(round_id, kind, told)
                answer = self._ask(round_id, kind, limit)
        self._sums.charge(round_id, server.clients)
        with self._adding:
            add_all(
                server,
                body_of=partial(self._files.spool.read, round_id),
                public_of=lambda name: self._ask(round_id, f"publics/{name}", length),
            )
            counts = self._told_counts(round_id, server) if server.facts.count_bytes else None
        if counts is not None:  # the other one may add up another sum first: none waits for both
            other = self._ask(round_id, "counts", count_message_bytes(server.facts))
            server.drop(*((counts, other) if server.party == 0 else (other, counts)))
        self._files.write(round_id, "share", server.share())
        _tell(round_id, "sum ready", f"{len(server.clients)} shares are added up", "info")
        if server.party == 1:  # the first has to keep what devices sent for both
            self._files.spool.remove(round_id)

    def _told_counts(self, round_id: str, server: SumServer) -> bytes:
        """What the other aggregator is told of counts. It stays: noise is drawn once."""
        counts = server.counts()
        if self._files.has(round_id, "counts"):
            return self._files.read(round_id, "counts")
        self._files.write(round_id, "counts", [counts])
        return counts

    def _opened(self, held: HeldSum) -> SumServer:
        """The server of a sum, which has accepted what is in its files."""
        settings, opening, model = self._sums.settings, held.opening, model_of(held.round)
        server = server_of(
            settings.aggregation, opening.terms, model, settings.party, opening.cohort
        )
        for name in self._files.spool.close(held.round):
            body = self._files.spool.read(held.round, name)
            # Checked when it came: what is refused now repeats another device's message.
            with suppress(ProtocolError):
                server.accept(name, server.facts.split_body(settings.party, body)[0])
        return server

    def _keep(self, round_id: str, name: str, content: bytes) -> None:
        """Writes what the other aggregator will ask for; what it may have been told stays."""
        if not self._files.has(round_id, name):
            self._files.write(round_id, name, [content])
        elif self._files.read(round_id, name) != content:
            raise MismatchError(
                "shares of devices are not those of which the other aggregator was told: got "
                "another list; expected the list that was told; check the disk of this aggregator, "
                "and run the round again"
            )

    def _ask(self, round_id: str, what: str, limit: int) -> bytes:
        """Asks the other aggregator until it answers; raises NotFoundError once nobody cares."""
        wait = _FIRST_WAIT
        while True:
            try:
                found = self._peer.get(round_id, what, limit)
            except ServiceError as error:
                self._waiting[round_id] = f"{error.wrong}: {error.got}"
            else:
                self._waiting.pop(round_id, None)
                return found
            if self._stop.wait(wait) or not self._files.has(round_id, "opening"):
                raise NotFoundError(
                    "no such sum: got one that was forgotten; expected one; open it"
                )
            wait = min(_LONGEST_WAIT, 1.5 * wait)

    def _give_up(self, round_id: str, error: KeyholeError) -> None:
        """Nothing is given out: what devices sent is of no use any more."""
        if self._stop.is_set():
            return
        with suppress(NotFoundError):
            self._sums.held(round_id)
            content = msgspec.json.encode(Failure.of(error))
            self._files.write(round_id, "failed", [content])
            _tell(round_id, "round empty", f"a sum is given up: {type(error).__name__}", "warning")
            self._files.spool.remove(round_id)

    def _note(self, round_id: str, error: Exception) -> None:
        """Where it happened is logged, what it says is not."""
        frame = extract_tb(error.__traceback__)[-1]
        place = f"{Path(frame.filename).name}:{frame.lineno}"
        self._waiting[round_id] = f"{type(error).__name__} at this aggregator"
        _LOG.error("a sum cannot go on: %s at %s", type(error).__name__, place)


def _tell(round_id: str, event: str, text: str, level: str) -> None:
    """Writes a line on a sum: counts and kinds of errors, which hold no name."""
    number = number_of(round_id)
    told = f"round {number}: {text}"
    tell("aggregator", event, told, level, round=number, round_id=round_id)
