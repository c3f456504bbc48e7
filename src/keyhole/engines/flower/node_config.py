"""Token files: what operators of other services hand out.

What a node's own operator says: `flower-supernode --node-config "..."`.

    client=7                 the node is client 7 of the population; without, anyone who is asked
    data="/srv/posts"        the data on this node, where it is not where the run config says
    ca="/etc/ca.pem"         PEM file of the authorities to trust for https
    insecure=true            plain http may leave this machine
    cache="/var/slices"      keep slices here: those that have not changed are not sent again
    second-token="FILE"      the token of this node at the second slice server, from its operator
    aggregator-tokens="F F"  files of its tokens at the two aggregators; without, the round's token
    delivery="pir"           take part only where slices are fetched so
    second="https://..."     and only with this second slice server
    aggregators="URL URL"    and only with these two aggregators

The last three are the node's own word against the server's. The code that reads them comes with
the app: anyone who does not trust the operator of the server also lets the node take only apps that
were signed by others (`--trusted-entities` of Flower).

Ways: how a call says that slices are fetched and updates are sent, and what stands for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

from keyhole.delivery.clear import DEFAULT_SERVED
from keyhole.device.cache import SliceCache
from keyhole.device.device import Device
from keyhole.device.take_part import Fetch, Participant, Send
from keyhole.engines.flower.messages import RoundCall
from keyhole.errors import InputError, NotAdmittedError

_MAX_SECRET = 4096  # bytes of a file that holds one


def read_secret(path: Path) -> str:
    """The token in a file.

    Raises:
        InputError: it holds none.
    """
    try:
        found = path.read_bytes()[:_MAX_SECRET].decode("ascii").strip()
    except (OSError, UnicodeDecodeError):
        found = ""
    if not found or " " in found:
        raise InputError(
            "no token can be read",
            got=f"file {path}",
            allowed="a file with one token",
            fix="ask the operator for one: `keyhole token` makes them",
        )
    return found


Connect: TypeAlias = Callable[[str, str | None], Device]
"""`(URL, token of the device there) -> a device`, closed when the round is over."""

_KINDS: dict[str, type] = {
    "client": int,
    "data": str,
    "ca": str,
    "insecure": bool,
    "cache": str,
    "second-token": str,
    "aggregator-tokens": str,
    "delivery": str,
    "second": str,
    "aggregators": str,
}


@dataclass(frozen=True)
class NodeConfig:
    """The configuration of a node, as the module describes it."""

    client: int | None = None
    data: str | None = None
    ca: str | None = None
    insecure: bool = False
    cache: str | None = None
    second_token: str | None = None
    aggregator_tokens: str | None = None
    delivery: str | None = None
    second: str | None = None
    aggregators: str | None = None

    @staticmethod
    def of(config: Mapping[str, object]) -> NodeConfig:
        """Reads `Context.node_config`; names that are not ours are left to others.

        Raises:
            InputError: a value of ours is of another kind.
        """
        found = {}
        for name, kind in _KINDS.items():
            value = config.get(name)
            if value is None:
                continue
            is_bool = isinstance(value, bool)
            is_kind = is_bool if kind is bool else isinstance(value, kind) and not is_bool
            if not is_kind or (name == "client" and isinstance(value, int) and value < 0):
                raise InputError(
                    f"--node-config has a {name} that cannot be used",
                    got=f"a {type(value).__name__}",
                    allowed="a whole number from 0" if kind is int else f"a {kind.__name__}",
                    fix=f"start the SuperNode with another {name}",
                )
            found[name.replace("-", "_")] = value
        return NodeConfig(**found)  # type: ignore[arg-type]  # kinds are checked above

    @property
    def stands_for(self) -> int:
        """The client that this node is; -1 for anyone who is asked."""
        return -1 if self.client is None else self.client

    def check(self, call: RoundCall) -> None:
        """Refuses a call that this node is not there for, or that asks for another way.

        Raises:
            NotAdmittedError: it does.
        """
        if self.client is not None and set(call.clients) != {self.client}:
            raise _refused("another client than this node is", "its own client alone")
        pinned = {
            "delivery": (self.delivery, call.delivery),
            "second slice server": (self.second, call.second),
            "pair of aggregators": (self.aggregators, " ".join(call.aggregators)),
        }
        for what, (mine, asked) in pinned.items():
            if mine is not None and mine != asked:
                raise _refused(f"another {what} than this node allows", "what --node-config says")

    def connector(self, stack: ExitStack, stop: threading.Event) -> Connect:
        """What makes devices of services, which `stack` closes and `stop` stops."""
        cache = None if self.cache is None else SliceCache(Path(self.cache))

        def connect(url: str, token: str | None) -> Device:
            made = Device(
                url, token=token, ca=self.ca, cache=cache, stop=stop, insecure=self.insecure
            )
            return stack.enter_context(closing(made))

        return connect


def _refused(got: str, allowed: str) -> NotAdmittedError:
    return NotAdmittedError(
        "this node does not take part in such a round",
        got=got,
        allowed=allowed,
        fix="change the run config of the app, or ask the operator of the node",
    )


_SECOND = "second"


def fetched_names() -> tuple[str, ...]:
    """Deliveries of a Flower run: a call names a second slice server, and no other party."""
    from keyhole.delivery import all_deliveries

    served = (each.about for each in all_deliveries() if each.about.is_served)
    return tuple(about.name for about in served if {*about.connects_to} <= {_SECOND})


def participant_for(
    call: RoundCall, participant: Participant, connect: Connect, node: NodeConfig
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
    if call.delivery != DEFAULT_SERVED:  # which needs nothing that is slow to load
        participant = replace(participant, fetch=_fetch(call, connect, node))
    if call.aggregators:
        participant = replace(participant, send=_shares(call, connect, node))
    return participant


def _fetch(call: RoundCall, connect: Connect, node: NodeConfig) -> Fetch:
    from keyhole.delivery import delivery_named
    from keyhole.device.fetching import fetch_by

    if call.delivery not in fetched_names():
        raise InputError(
            "a call names a delivery that is not known here",
            got=repr(call.delivery),
            allowed=", ".join(fetched_names()),
            fix="run one version of keyhole on the server and on all nodes",
        )
    delivery = delivery_named(call.delivery)
    others = {
        name: connect(call.second, _token(node.second_token)) for name in delivery.about.connects_to
    }
    return fetch_by(delivery, others)


def _shares(call: RoundCall, connect: Connect, node: NodeConfig) -> Send:
    from keyhole.device.sums import SumSend

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
