"""Whether a device is given the same gateway key as all others: two sources must agree.

A gateway that gave one device a key of its own could tell its requests from all others (RFC 9458,
section 7). So a device asks the gateway itself and the relay, or is given a file by its operator.
Two sources that work together can still deceive it.
"""

from __future__ import annotations

from dataclasses import dataclass

from keyhole.errors import MalformedError, RequestError, ServiceError
from keyhole.private.oblivious.key_config import KeyConfig, decode_configs
from keyhole.serving.device.client import Client
from keyhole.serving.relay.gateway_line import MOST_CONFIG
from keyhole.serving.relay.gateway_routes import KEYS_PATH
from keyhole.serving.relay.relay import RELAY_KEYS_PATH

__all__ = ["agreed_config"]


@dataclass(frozen=True)
class _Source:
    name: str
    client: Client
    path: str

    def fetch(self) -> bytes:
        try:
            return bytes(self.client.get(self.path, most=MOST_CONFIG).body)
        except RequestError as error:
            raise _no_key(f"a refusal of the {self.name}, {type(error).__name__}") from error


def agreed_config(relay: Client, gateway: Client, pinned: bytes | None) -> KeyConfig:
    """Returns the key configuration to use.

    Args:
        relay: passes on what the gateway tells it.
        gateway: tells it the device directly; what is asked is no secret.
        pinned: a list of configurations that the device holds; then nobody is asked.

    Raises:
        ServiceError: the sources differ, or one gives none that can be used.
    """
    listed = pinned
    if listed is None:
        listed = _Source("relay", relay, RELAY_KEYS_PATH).fetch()
        if _Source("gateway", gateway, KEYS_PATH).fetch() != listed:
            raise _no_key("one from the relay and another from the gateway")
    try:
        return decode_configs(listed)[0]
    except MalformedError as error:
        raise _no_key("none that can be used") from error


def _no_key(got: str) -> ServiceError:
    return ServiceError(
        "no key configuration that all devices share",
        got=got,
        allowed="the same from relay and gateway, or one of a file",
        fix="try again; if it happens every time, ask the operator for the configuration",
    )
