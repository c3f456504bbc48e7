"""Issues and checks tokens, and guards routes: who may take part, and how often they may ask.

    kh1.<payload>.<signature>      payload: base64url of JSON; signature: base64url of HMAC-SHA256
                                   over "kh1.<payload>"

There is one algorithm, and a token cannot name another. The signature is compared in its text form,
so each token has exactly one spelling. A device token lets a device check in; it gets a round token
in return, which is good for one round.
"""

from __future__ import annotations

import hmac
import re
import secrets
import time
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from math import inf
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

from keyhole.errors import AccessError, InputError, MediaTypeError, NotAdmittedError, TooManyError
from keyhole.service.limits import Gate, Limits, TokenBuckets
from keyhole.service.metrics import Metrics
from keyhole.service.routes import BINARY, Request

TokenKind: TypeAlias = Literal["device", "round"]
"""What a token is for: to check in, or to take part in one round."""

DEVICE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""Names of devices: they are names of files as well."""

LEEWAY = 60.0
"""Seconds by which the clocks of a service may differ, or jump."""

_VERSION = 1
_PREFIX = b"kh1."
_SIGNATURE = 43  # characters of 32 bytes
_MAX_TOKEN = 1024  # bytes; longer ones are refused before any work
_MIN_KEY = 32  # bytes, as long as the digest
_MAX_CACHED = 16384  # verified tokens; 5 MB


class TokenClaims(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a token says."""

    version: int
    kind: TokenKind
    device: str
    issued: float  # unix seconds; it is not good before
    expires: float  # unix seconds; it is not good from then on
    round: str | None = None  # the only round it is good for; null for a device token
    max_keys: int | None = None  # how many keys one query may name; null leaves it to the service


def check_device_name(name: str) -> str:
    """Returns the name of a device; raises InputError unless it can be one."""
    if not DEVICE_NAME.fullmatch(name):
        raise InputError(
            f"not the name of a device: got {len(name)} characters; expected 1 to 64 letters, "
            "digits, '.', '_' and '-', a letter or digit first; choose another name"
        )
    return name


def new_key() -> str:
    """A new signing key in hex, from the system's source of secrets."""
    return secrets.token_hex(_MIN_KEY)


@dataclass(frozen=True)
class Keyring:
    """The keys that sign tokens: the first signs, all verify, so that keys can be changed.

    >>> ring = Keyring((b"k" * 32,))
    >>> token = ring.issue("device", "phone-1", now=1000.0, seconds=60.0)
    >>> ring.verify(token.encode(), now=1001.0).device
    'phone-1'
    """

    keys: tuple[bytes, ...]  # 32 bytes or more each
    _known: dict[bytes, TokenClaims] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.keys or any(len(key) < _MIN_KEY for key in self.keys):
            raise InputError(
                f"signing keys are missing or too short: got {len(self.keys)} keys; expected one "
                f"or more of {_MIN_KEY} bytes; make one with `keyhole token new-key`"
            )

    def __repr__(self) -> str:
        """Keys are secret: printing shows how many there are."""
        return f"Keyring({len(self.keys)} keys)"

    @staticmethod
    def load(path: Path) -> Keyring:
        """Reads a file of keys, one in hex on each line; refuses it if others may read it."""
        try:
            mode, text = path.stat().st_mode, path.read_text("ascii")
        except (OSError, UnicodeDecodeError) as error:
            raise _bad_file(path, type(error).__name__, "a file of keys in hex") from error
        if mode & 0o077:
            raise InputError(
                f"{path.name} can be read by others: got mode {mode & 511:o}; expected mode 600: "
                f"its owner alone; chmod 600 {path.name}, and make a new key if it may have been "
                "seen"
            )
        try:
            keys = tuple(bytes.fromhex(line) for line in text.split())
        except ValueError as error:
            raise _bad_file(path, "other characters", "hex digits, one key a line") from error
        return Keyring(keys)

    def issue(
        self,
        kind: TokenKind,
        device: str,
        *,
        now: float,
        seconds: float,
        round_id: str | None = None,
        max_keys: int | None = None,
    ) -> str:
        """Returns a token that is good for this many seconds from `now`, in unix seconds."""
        claims = TokenClaims(
            version=_VERSION,
            kind=kind,
            device=check_device_name(device),
            issued=now,
            expires=now + seconds,
            round=round_id,
            max_keys=max_keys,
        )
        signed = _PREFIX + _encode(msgspec.json.encode(claims))
        return (signed + b"." + _sign(self.keys[0], signed)).decode("ascii")

    def verify(self, token: bytes, now: float) -> TokenClaims:
        """Returns what a token says; raises AccessError unless it is signed here and in time."""
        claims = self._known.get(token)
        if claims is None:
            claims = self._read(token)
            if len(self._known) >= _MAX_CACHED:
                self._known.clear()
            self._known[token] = claims
        if not claims.issued - LEEWAY <= now < claims.expires + LEEWAY:
            raise _refused("the token is expired, or not yet good")
        return claims

    def _read(self, token: bytes) -> TokenClaims:
        """The claims of a token whose signature is right."""
        signed, _, signature = token.rpartition(b".")
        is_token = len(token) <= _MAX_TOKEN and signed.startswith(_PREFIX)
        if not is_token or len(signature) != _SIGNATURE:
            raise _refused("the token is malformed")
        # Every key is tried, so that time does not tell which one signed.
        matches = [hmac.compare_digest(_sign(key, signed), signature) for key in self.keys]
        if not any(matches):
            raise _refused("the token was not signed here")
        try:
            payload = urlsafe_b64decode(signed[len(_PREFIX) :] + b"==")  # too many "=" are ignored
            claims = msgspec.json.decode(payload, type=TokenClaims)
        except (ValueError, msgspec.DecodeError) as error:
            raise _refused("the token is of another version") from error
        if claims.version != _VERSION or not DEVICE_NAME.fullmatch(claims.device):
            raise _refused("the token is of another version")
        return claims


@dataclass(frozen=True)
class Access:
    """Who may do what."""

    # checks and signs tokens; None for a service that knows none and takes no updates
    keyring: Keyring | None = None
    reads_need_token: bool = False  # whether slices are for devices of the round only
    round_seconds: float = 3600.0  # how long a round token is good

    def __post_init__(self) -> None:
        if self.reads_need_token and self.keyring is None:
            raise InputError(
                "reads need a token, but there is no key to check one with: got no keyring; "
                "expected a keyring, or open reads; make a key with `keyhole token new-key`"
            )

    def identify(self, headers: Mapping[bytes, bytes], now: float) -> TokenClaims:
        """Returns the claims of a request's token; raises AccessError if it has no good one."""
        if self.keyring is None:
            raise _refused("this service issues no tokens")
        scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() != b"bearer" or not token:
            raise _refused("a token is needed")
        return self.keyring.verify(token, now)

    def member(self, headers: Mapping[bytes, bytes], round_id: str, now: float) -> TokenClaims:
        """Returns the claims of a device of a round; raises NotAdmittedError for another round."""
        claims = self.identify(headers, now)
        if claims.kind != "round" or claims.round != round_id:
            raise not_admitted("a token of another kind or round", "a token of this round")
        return claims

    def device(self, headers: Mapping[bytes, bytes], now: float) -> TokenClaims:
        """The claims of a device that checks in; errors as for `member`."""
        claims = self.identify(headers, now)
        if claims.kind != "device":
            raise not_admitted("a round token", "a device token")
        return claims


def not_admitted(got: str, allowed: str) -> NotAdmittedError:
    """The error of a good token that does not allow what was asked."""
    fix = "check in for the current round"
    return NotAdmittedError(f"the token does not allow this: got {got}; expected {allowed}; {fix}")


def _refused(wrong: str) -> AccessError:
    return AccessError(
        f"{wrong}: got no good token; expected authorization: Bearer kh1....; check in again, or "
        "ask the operator for a token"
    )


def _bad_file(path: Path, got: str, allowed: str) -> InputError:
    fix = "make one with `keyhole token new-key`"
    return InputError(f"cannot use the keys in {path.name}: got {got}; expected {allowed}; {fix}")


def _sign(key: bytes, signed: bytes) -> bytes:
    return _encode(hmac.digest(key, signed, sha256))


def _encode(data: bytes) -> bytes:
    return urlsafe_b64encode(data).rstrip(b"=")


class Guards:
    """Access, limits and counts of one service; all its routes share them."""

    def __init__(
        self, access: Access, limits: Limits, metrics: Metrics, clock: Callable[[], float]
    ) -> None:
        self.access, self.limits, self.metrics, self.clock = access, limits, metrics, clock

        def on_wait(change: int) -> None:
            metrics.change("waiting", change)

        self.gathers = Gate(limits.in_flight, limits.waiting, on_wait)
        self.memory = Gate(limits.max_held, limits.waiting, on_wait)
        # Their own: anyone who sends slowly holds up those who send, but not those who read.
        self.uploads = Gate(limits.max_held, limits.waiting, on_wait)
        self._by_device = TokenBuckets(limits.rate, limits.burst, limits.max_devices)
        self._by_address = TokenBuckets(limits.rate_per_address, limits.burst, limits.max_devices)

    def admit(self, request: Request, round_id: str) -> TokenClaims | None:
        """Anyone who may read a round, if not too often; None where reading is free for all."""
        access, claims = self.access, None
        if access.reads_need_token:
            claims = access.member(request.headers, round_id, self.clock())
        self.count(request, claims)
        return claims

    def count(self, request: Request, claims: TokenClaims | None) -> None:
        """Counts a request of a device or an address; raises TooManyError if it asks too often."""
        if claims is not None:
            seconds = self._by_device.wait(claims.device, time.monotonic())
        elif self.limits.rate_per_address == inf:
            return
        else:
            seconds = self._by_address.wait(request.address, time.monotonic())
        if seconds:
            rate = self.limits.rate_per_address if claims is None else self.limits.rate
            raise TooManyError(
                f"too many requests: got one more; expected {rate:g} a second; wait {seconds:.3g} s"
            )

    def check_type(self, request: Request) -> None:
        """Raises MediaTypeError unless the body is said to be a message of `docs/wire.md`."""
        if request.headers.get(BINARY[0]) != BINARY[1]:
            raise MediaTypeError(
                "a body of another content type: got another type; expected "
                f"{BINARY[1].decode('ascii')}; send that content-type"
            )
