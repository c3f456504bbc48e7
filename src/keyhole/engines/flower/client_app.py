"""Makes the ClientApp: a node takes part in a round for the clients that it stands for.

The message says which round and where; slices come from the slice service and updates go there. The
reply holds counts. What goes wrong in a client's own code is written to the log of the node: what
the server is told names no key and no data.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path
from typing import NamedTuple, TypeAlias

from flwr.app import Context, Error, Message
from flwr.clientapp import ClientApp

from keyhole.delivery.clear import DEFAULT_SERVED
from keyhole.device.device import Assignment, Device
from keyhole.device.take_part import Fetch, Participant, Send, take_part_in
from keyhole.engines.flower.config import Connect, NodeConfig, fetched_names, read_secret
from keyhole.engines.flower.messages import FAILED, Here, NodeReport, RoundCall, read, write
from keyhole.errors import (
    DamageError,
    InputError,
    KeyholeError,
    MalformedError,
    NotFiniteError,
    RequestError,
    ServiceError,
    StorageError,
    TooLateError,
)
from keyhole.wire.assignment import device_name

ParticipantOf: TypeAlias = Callable[[int, Context], Participant]
"""`(client, context of the node) -> what that client does in a round`."""

# Errors whose messages may be seen at a server: they carry counts, never a key.
_TOLD = (RequestError, NotFiniteError, ServiceError, DamageError, StorageError)
_LOG = logging.getLogger("flwr.keyhole")


def make_client_app(participant_of: ParticipantOf) -> ClientApp:
    """Returns a ClientApp that takes part in rounds of federated select.

    Args:
        participant_of: what a client does in a round; called again for every round, since Flower
            starts a process for every message.
    """
    app = ClientApp()
    join(app, participant_of)
    return app


def join(app: ClientApp, participant_of: ParticipantOf) -> None:
    """Lets a ClientApp of your own take part, beside what else it does.

    Args:
        app: gets two functions more, for messages of the types `train.keyhole` and `query.keyhole`.
        participant_of: as for `make_client_app`.
    """

    @app.query("keyhole")
    def query(message: Message, context: Context) -> Message:
        def here() -> Here:
            client = NodeConfig.of(context.node_config).client
            return Here() if client is None else Here(client)

        return _answered(message, here)

    @app.train("keyhole")
    def train(message: Message, context: Context) -> Message:
        return _answered(
            message, lambda: _take_part(read(message.content, RoundCall), context, participant_of)
        )


def _answered(message: Message, work: Callable[[], NodeReport | Here]) -> Message:
    """The reply: what the work returns, or one sentence on why there is nothing."""
    try:
        content = write(work())
    except KeyholeError as error:  # of the message or the configuration: no client has begun
        _LOG.error("%s", error)
        return Message(Error(FAILED, f"{type(error).__name__}: {error}"), reply_to=message)
    return Message(content, reply_to=message)


def _take_part(call: RoundCall, context: Context, participant_of: ParticipantOf) -> NodeReport:
    """Takes part for one client after the other, until the round is over."""
    node = NodeConfig.of(context.node_config)
    node.check(call)
    for named in (call.tokens, call.sum_tokens_0, call.sum_tokens_1):
        if named and len(named) != len(call.clients):
            raise MalformedError(
                f"a call names another number of tokens than clients: got {len(named)} tokens; "
                f"expected {len(call.clients)}, or none; run one version of keyhole on the server "
                "and on all nodes"
            )
    stop = threading.Event()
    timer = threading.Timer(min(call.seconds, threading.TIMEOUT_MAX), stop.set)
    timer.daemon = True
    timer.start()
    try:
        none = (None,) * len(call.clients)
        pairs = tuple(zip(call.sum_tokens_0, call.sum_tokens_1, strict=True)) or none
        told = [
            Assignment(call.round, call.number, token, sum_tokens=pair)
            for token, pair in zip(call.tokens or none, pairs, strict=True)
        ]
        lots = [
            _one(call, client, each, node, stop, partial(participant_of, client, context))
            for client, each in zip(call.clients, told, strict=True)
        ]
    finally:
        timer.cancel()
    return NodeReport(
        clients=call.clients,
        outcomes=tuple(lot.outcome for lot in lots),
        reasons=tuple(lot.reason for lot in lots),
        bytes_down=tuple(lot.bytes_down for lot in lots),
        bytes_up=tuple(lot.bytes_up for lot in lots),
        seconds=tuple(lot.seconds for lot in lots),
    )


class _Lot(NamedTuple):
    """What became of one client."""

    outcome: str
    reason: str
    bytes_down: int
    bytes_up: int
    seconds: float


def _one(
    call: RoundCall,
    client: int,
    told: Assignment,
    node: NodeConfig,
    stop: threading.Event,
    make: Callable[[], Participant],
) -> _Lot:
    began, reason, outcome, down, up = time.monotonic(), "", "failed", 0, 0
    try:
        with ExitStack() as stack:
            connect = node.connector(stack, stop)
            device: Device = connect(call.service, None)
            participant = participant_for(call, client, make(), connect, node)
            taken = take_part_in(device, told, participant)
            outcome, down, up = "sent", taken.bytes_down, taken.bytes_up
    except TooLateError:
        outcome = "late"
    except _TOLD as error:
        outcome, reason = "late" if stop.is_set() else "failed", str(error)
        _LOG.warning("%s", error)
    except Exception as error:  # noqa: BLE001 - whatever it is, it may name keys or data
        reason = f"the client's own code failed with {type(error).__name__}: see the node's log"
        _LOG.error("a client failed", exc_info=True)
    return _Lot(outcome, reason, down, up, time.monotonic() - began)


def participant_for(
    call: RoundCall, client: int, participant: Participant, connect: Connect, node: NodeConfig
) -> Participant:
    """Returns the participant, fetching and sending as the call says; a way of its own stays where
    the call names none. Raises InputError for a way that this version does not know, or where a
    token is missing."""
    if call.delivery != DEFAULT_SERVED:  # which needs nothing that is slow to load
        participant = replace(participant, fetch=_fetch(call, connect, node))
    if call.aggregators:
        participant = replace(participant, send=_shares(call, client, connect, node))
    return participant


def _fetch(call: RoundCall, connect: Connect, node: NodeConfig) -> Fetch:
    from keyhole.delivery import delivery_named
    from keyhole.device.take_part import fetch_by

    if call.delivery not in fetched_names():
        raise InputError(
            f"a call names a delivery that is not known here: got {call.delivery!r}; expected "
            f"{', '.join(fetched_names())}; run one version of keyhole on the server and on all "
            "nodes"
        )
    delivery = delivery_named(call.delivery)
    others = {
        name: connect(call.second, _token(node.second_token)) for name in delivery.about.connects_to
    }
    return fetch_by(delivery, others)


def _shares(call: RoundCall, client: int, connect: Connect, node: NodeConfig) -> Send:
    from keyhole.aggregation.privacy.ledger import Budget, Ledger, default_ledger
    from keyhole.device.sums import SumSend, aggregator_of

    named = node.aggregator_tokens
    files: list[str | None] = [None, None] if named is None else [*named.split()]
    if len(call.aggregators) != 2 or len(files) != 2:
        raise InputError(
            "a secure sum needs two aggregators, and a token for both or for none: got "
            f"{len(call.aggregators)} aggregators, {len(files)} files of tokens; expected two of "
            "each; check the run config, and aggregator-tokens of --node-config"
        )
    (one, first_key), (other, second_key) = map(aggregator_of, call.aggregators)
    first, second = (
        connect(url, _token(file)) for url, file in zip((one, other), files, strict=True)
    )
    budget = Budget(inf if node.max_epsilon is None else node.max_epsilon)
    file = default_ledger() if node.ledger is None else Path(node.ledger)
    ledger = Ledger(file, budget)
    keys = first_key, second_key
    return SumSend(first, second, keys, ledger=ledger, name=device_name(client))


def _token(path: str | None) -> str | None:
    return None if path is None else read_secret(Path(path))
