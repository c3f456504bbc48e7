"""Ways: how a call says that slices are fetched and updates are sent, and what stands for it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from keyhole.engines.flower.messages import Call
from keyhole.engines.flower.node_config import Connect, NodeConfig
from keyhole.engines.flower.token_files import read_secret
from keyhole.errors import InputError
from keyhole.serving.device.participation import Fetch, Participant, Send

__all__ = ["DELIVERIES", "participant_for"]

DELIVERIES = ("clear", "pir")
"""How devices of a Flower run fetch: by keys that the service sees, or from two servers."""


def participant_for(
    call: Call, participant: Participant, connect: Connect, node: NodeConfig
) -> Participant:
    """The participant, fetching and sending as the call says.

    Args:
        call: of the round.
        participant: what the client does; a way of its own stays where the call names none.
        connect: makes devices of further services.
        node: what the operator of the node says.

    Raises:
        InputError: the call names a way that this version does not know, or a token is missing.
    """
    if call.delivery not in DELIVERIES:
        raise InputError(
            "a call names a delivery that is not known here",
            got=repr(call.delivery),
            allowed=", ".join(DELIVERIES),
            fix="run one version of keyhole on the server and on all nodes",
        )
    if call.delivery == "pir":
        participant = replace(participant, fetch=_pir(call, connect, node))
    if call.aggregators:
        participant = replace(participant, send=_shares(call, connect, node))
    return participant


def _pir(call: Call, connect: Connect, node: NodeConfig) -> Fetch:
    from keyhole.serving.pir.pir_fetch import PirFetch  # its kernels take time to load

    return PirFetch(connect(call.second, _token(node.second_token)))


def _shares(call: Call, connect: Connect, node: NodeConfig) -> Send:
    from keyhole.serving.sums.sum_send import SumSend

    named = node.aggregator_tokens
    files: list[str | None] = [None, None] if named is None else [*named.split()]
    if len(call.aggregators) != 2 or len(files) != 2:
        raise InputError(
            "a secure sum needs two aggregators, and a token for both or for none",
            got=f"{len(call.aggregators)} aggregators, {len(files)} files of tokens",
            allowed="two of each",
            fix="check the run config, and aggregator-tokens of --node-config",
        )
    first, second = (
        connect(url, _token(file)) for url, file in zip(call.aggregators, files, strict=True)
    )
    return SumSend(first, second)


def _token(path: str | None) -> str | None:
    return None if path is None else read_secret(Path(path))
