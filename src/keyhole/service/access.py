"""Issues, checks and revokes tokens: who may take part, and at which kind of service.

    kh2.<payload>.<signature>      payload: base64url of JSON; signature: base64url of HMAC-SHA256
                                   over "kh2.<payload>"

There is one algorithm, and a token cannot name another. The signature is compared in its text form,
so each token has exactly one spelling. A device token lets a device check in; it gets round tokens
in return, which are good for one round, each at one kind of service. They carry the id of the
device token, so that revoking one id ends all of them.
"""

from __future__ import annotations

import hmac
import logging
import re
import secrets
import time
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

from keyhole.errors import (
    AccessError,
    InputError,
    NotAdmittedError,
    UntimelyError,
)
from keyhole.wire.assignment import SHOWN, shown

TokenKind: TypeAlias = Literal["device", "round", "query"]
"""What a token is for: to check in, to take part in one round, or to send private queries in one
round without a name."""

Audience: TypeAlias = Literal["slices", "aggregator", "relay"]
"""The kind of service that a token is for; others refuse it."""

DEVICE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""Names of devices: they are names of files as well."""

LEEWAY = 60.0
"""Seconds by which the clocks of a service may differ, or jump."""

TOKEN_ID = re.compile(r"[0-9a-f]{32}")
"""Names of tokens: 128 bits in hex."""

_VERSION = 2
_PREFIX, _SHOWN = b"kh2.", SHOWN.encode("ascii")
_SIGNATURE = 43  # characters of 32 bytes
_MAX_TOKEN = 1024  # bytes; longer ones are refused before any work
_MIN_KEY = 32  # bytes, as long as the digest
_MAX_CACHED = 16384  # verified tokens; 5 MB
_LOOK_EVERY = 1.0  # seconds between two looks at a deny list
_MAX_DENIED = 64 << 20  # bytes of a deny list: two million ids
_LOG = logging.getLogger("keyhole.service")


class TokenClaims(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a token says."""

    version: int
    id: str  # by which it is revoked; round tokens have that of the device token
    audience: Audience
    kind: TokenKind
    device: str
    issued: float  # unix seconds; it is not good before
    expires: float  # unix seconds; it is not good from then on
    round: str | None = None  # the only round it is good for; null for a device token
    max_keys: int | None = None  # how many keys one query may name; null leaves it to the service
    # the only runs of the service that it is good for; all of them where it does not say
    runs: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET


def check_device_name(name: str, what: str = "a device") -> str:
    """Returns the name of a device, or of a run; raises InputError unless it can be one."""
    if not DEVICE_NAME.fullmatch(name):
        raise InputError(
            f"not the name of {what}: got {len(name)} characters; expected 1 to 64 letters, "
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

    def for_aggregator(self, party: int) -> Keyring:
        """The keys of tokens that devices of this service show to one aggregator.

        Who has them can make none for this service or for the other aggregator: they are HMACs of
        these keys, one for each party.
        """
        name = b"keyhole aggregator %d" % party
        return Keyring(tuple(hmac.digest(key, name, "sha256") for key in self.keys))

    def issue(
        self,
        kind: TokenKind,
        device: str,
        *,
        now: float,
        seconds: float,
        audience: Audience = "slices",
        token_id: str | None = None,
        round_id: str | None = None,
        max_keys: int | None = None,
        runs: Sequence[str] = (),
    ) -> str:
        """Returns a token that is good for this many seconds from `now`, in unix seconds.

        `token_id` is that of the token that this one follows from; a new one if None. With `runs`
        it is good for runs of these names alone.
        """
        claims = TokenClaims(
            version=_VERSION,
            id=secrets.token_hex(16) if token_id is None else token_id,
            audience=audience,
            kind=kind,
            device=check_device_name(device),
            issued=now,
            expires=now + seconds,
            round=round_id,
            max_keys=max_keys,
            runs=tuple(check_device_name(each, "a run") for each in runs) or msgspec.UNSET,
        )
        signed = _PREFIX + _encode(msgspec.json.encode(claims))
        return (signed + b"." + _encode(hmac.digest(self.keys[0], signed, sha256))).decode("ascii")

    def verify(self, token: bytes, now: float) -> TokenClaims:
        """Returns what a token says; raises AccessError unless it is signed here and in time."""
        claims = self._known.get(token)
        if claims is None:
            claims = self._read(token)
            if len(self._known) >= _MAX_CACHED:
                self._known.clear()
            self._known[token] = claims
        if not claims.issued - LEEWAY <= now < claims.expires + LEEWAY:
            raise UntimelyError(
                f"the token is expired, or not yet good: got {now:.0f} by the clock of the "
                f"service; expected unix seconds {claims.issued:.0f} to {claims.expires:.0f}; ask "
                "for a new token, or set that clock"
            )
        return claims

    def whole(self, token: bytes) -> str:
        """Returns all of a token of which this may be what is shown on the way (`shown`); raises
        AccessError unless it is signed here."""
        signed, _, signature = token.rpartition(b".")
        is_shown = signed.startswith(_SHOWN)
        if is_shown:
            signed = _PREFIX + signed.removeprefix(_SHOWN)
        is_token = len(token) <= _MAX_TOKEN and signed.startswith(_PREFIX)
        if not is_token or len(signature) != _SIGNATURE:
            raise _refused("the token is malformed")
        # Every key is tried, so that time does not tell which one signed.
        made = [
            (signed + b"." + _encode(hmac.digest(key, signed, sha256))).decode("ascii", "replace")
            for key in self.keys
        ]
        seen = [(shown(one) if is_shown else one).encode() for one in made]
        same = [hmac.compare_digest(one, token) for one in seen]
        if not any(same):
            raise _refused("the token was not signed here")
        return made[same.index(True)]

    def _read(self, token: bytes) -> TokenClaims:
        """The claims of a token whose signature is right."""
        signed = self.whole(token).encode().rpartition(b".")[0]
        try:
            payload = urlsafe_b64decode(signed[len(_PREFIX) :] + b"==")  # too many "=" are ignored
            claims = msgspec.json.decode(payload, type=TokenClaims)
        except (ValueError, msgspec.DecodeError, RecursionError) as error:
            raise _refused("the token is of another version") from error
        is_named = DEVICE_NAME.fullmatch(claims.device) and TOKEN_ID.fullmatch(claims.id)
        if claims.version != _VERSION or not is_named:
            raise _refused("the token is of another version")
        return claims


class DenyList:
    """The ids of tokens that count no more: a file with one on each line, `#` before a remark.

    The file is looked at every second and read when it has changed. What cannot be read takes
    nothing back: the ids that were denied before stay denied, beside those that can be read.

    Raises:
        InputError: the file cannot be read, or has a line that is no id, when the list is made.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path, self._clock = path, clock
        self._mark, self._looked = self._stat(), clock()
        ids, wrong = self._read()
        if wrong:
            raise InputError(
                f"cannot use the deny list {path.name}: got {wrong}; expected ids of 32 hex "
                "digits, one a line; `keyhole token show` tells the id of a token"
            )
        self._ids = ids

    def __contains__(self, token_id: str) -> bool:
        """Whether a token is denied."""
        if (now := self._clock()) - self._looked >= _LOOK_EVERY:
            self._looked = now
            self._look()
        return token_id in self._ids

    def __repr__(self) -> str:
        return f"DenyList({len(self._ids)} ids)"

    def _look(self) -> None:
        mark = self._stat()
        if mark == self._mark:
            return
        ids, wrong = self._read()
        self._mark = mark
        if wrong:
            _LOG.error("the deny list has %s: what was denied stays denied", wrong)
            ids |= self._ids
        self._ids = ids

    def _stat(self) -> tuple[int, int, int] | None:
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_ino, found.st_size, found.st_mtime_ns

    def _read(self) -> tuple[frozenset[str], str]:
        """The ids that can be read, and what is wrong with the rest."""
        try:
            with self._path.open("rb") as file:
                text = file.read(_MAX_DENIED + 1).decode("ascii", "replace")
        except OSError as error:
            return frozenset(), f"no file to read, {type(error).__name__}"
        lines = [line.partition("#")[0].strip() for line in text.splitlines()]
        bad = sum(1 for line in lines if line and not TOKEN_ID.fullmatch(line))
        is_long = len(text) > _MAX_DENIED
        wrong = "more than 64 MB" if is_long else f"{bad} lines that are no id" if bad else ""
        return frozenset(line for line in lines if TOKEN_ID.fullmatch(line)), wrong


@dataclass(frozen=True)
class Access:
    """Who may do what at one service."""

    # checks and signs tokens; None for a service that knows none and takes no updates
    keyring: Keyring | None = None
    reads_need_token: bool = False  # whether slices are for devices of the round only
    round_seconds: float = 3600.0  # how long a round token is good
    audience: Audience = "slices"  # tokens for another kind of service are refused
    denied: DenyList | None = None  # tokens that were revoked
    open_queries: bool = False  # whether private queries are for everyone
    # the run that is asked for, empty for the one without a name; None where there are no runs
    run: str | None = None

    def __post_init__(self) -> None:
        if self.reads_need_token and self.keyring is None:
            raise InputError(
                "reads need a token, but there is no key to check one with: got no keyring; "
                "expected a keyring, or open reads; make a key with `keyhole token new-key`"
            )

    def identify(self, headers: Mapping[bytes, bytes], now: float) -> TokenClaims:
        """Returns the claims of a request's token; raises AccessError if it has no good one."""
        keyring, token = self._bearer(headers)
        claims = keyring.verify(token, now)
        if self.denied is not None and claims.id in self.denied:
            raise _refused("the token was revoked")
        if claims.audience != self.audience:
            raise NotAdmittedError(
                f"the token is for another kind of service: got {claims.audience}; expected "
                f"{self.audience}; ask the operator for a token of `keyhole token issue --audience "
                f"{self.audience}`"
            )
        runs = (self.run,) if claims.runs is msgspec.UNSET else claims.runs
        if self.run is not None and self.run not in runs:
            here, allowed = self.run or "the one without a name", ", ".join(map(str, runs))
            raise NotAdmittedError(
                f"the token is not for this run: got {here}; expected one of {allowed}; use the "
                "URL of that run, or ask the operator for a token of `keyhole token issue --run`"
            )
        return claims

    @property
    def runs(self) -> tuple[str, ...]:
        """The runs that tokens are for which are given out here."""
        return (self.run,) if self.run else ()

    def _bearer(self, headers: Mapping[bytes, bytes]) -> tuple[Keyring, bytes]:
        """The token of a request, and the keys that check it."""
        if self.keyring is None:
            raise _refused("this service issues no tokens")
        scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() != b"bearer" or not token:
            raise _refused("a token is needed")
        return self.keyring, token

    def whole(self, headers: Mapping[bytes, bytes]) -> str:
        """Returns all of the token that a request shows, or shows a part of."""
        keyring, token = self._bearer(headers)
        return keyring.whole(token)

    def member(self, headers: Mapping[bytes, bytes], round_id: str, now: float) -> TokenClaims:
        """Returns the claims of a device of a round; raises NotAdmittedError for another round."""
        claims = self.identify(headers, now)
        if claims.kind != "round" or claims.round != round_id:
            raise not_admitted("a token of another kind or round", "a token of this round")
        return claims

    def asker(self, headers: Mapping[bytes, bytes], round_id: str, now: float) -> TokenClaims:
        """The claims of one who may read in a round, named or not; errors as for `member`."""
        claims = self.identify(headers, now)
        if claims.kind == "device" or claims.round != round_id:
            raise not_admitted("a token of another kind or round", "a token of this round")
        return claims

    def device(self, headers: Mapping[bytes, bytes], now: float) -> TokenClaims:
        """The claims of a device that checks in; errors as for `member`."""
        claims = self.identify(headers, now)
        if claims.kind != "device":
            raise not_admitted("a token of a round", "a device token")
        return claims


def not_admitted(got: str, allowed: str) -> NotAdmittedError:
    """The error of a good token that does not allow what was asked."""
    fix = "check in for the current round"
    return NotAdmittedError(f"the token does not allow this: got {got}; expected {allowed}; {fix}")


def _refused(wrong: str) -> AccessError:
    return AccessError(
        f"{wrong}: got no good token; expected authorization: Bearer kh2....; check in again, or "
        "ask the operator for a token, which `keyhole device` takes as --token-file"
    )


def _bad_file(path: Path, got: str, allowed: str) -> InputError:
    fix = "make one with `keyhole token new-key`"
    return InputError(f"cannot use the keys in {path.name}: got {got}; expected {allowed}; {fix}")


def _encode(data: bytes) -> bytes:
    return urlsafe_b64encode(data).rstrip(b"=")
