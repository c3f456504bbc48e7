"""Admits devices without knowing which: signs blinded tokens, and takes each of them once.

The coordinator signs a few blinded tokens for each device that it let into a round, under a key of
that round. Who shows one of them may take part; which device it is, the signature does not tell.
Everything that must outlive a process is in files below `DIRECTORY/admission`, readable by their
owner alone:

    <round>/key          the private key of the round, at the service that signs
    <round>/of-<device>  the digest of what was signed for a device, so that it is signed once
    <round>/spent        nonces of the tokens that were taken, 32 bytes each

Hidden from a service that takes tokens: which device has shown one, as long as all devices were
given the same key. Not hidden: how many devices there are, addresses, and times.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import secrets
import shutil
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from keyhole.crypto.blind import SIGNATURE_BYTES, BlindPublic, BlindSigner
from keyhole.errors import (
    ConflictError,
    MalformedError,
    NotFoundError,
    ReplayError,
    StorageError,
    TooLargeError,
)
from keyhole.files import (
    SECRET,
    make_directory,
    passing_file,
    storage_errors,
    sweep,
    sync_directory,
    write_all,
)
from keyhole.service.access import check_device_name
from keyhole.service.app import parse_round
from keyhole.service.guards import Guards
from keyhole.service.routes import BINARY, NO_STORE, Request, Response, Route, json_response
from keyhole.wire.assignment import RoundSource
from keyhole.wire.http import HttpClient
from keyhole.wire.manifest import number_of
from keyhole.wire.private import (
    MAX_CONFIG,
    TOKEN_BYTES,
    admission_path,
    check_token,
    queries_at,
    redeem_path,
)

MAX_TOKENS = 8
"""That are signed for a device in a round: one for each server of queries, some for a relay."""

_ROUNDS = 4  # whose files are kept
_NONCE = 32


@dataclass
class AdmissionFiles:
    """What is kept of each round. Threads and processes may share the directory."""

    directory: Path
    _signers: dict[str, BlindSigner] = field(default_factory=dict)
    _spent: dict[str, set[bytes]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def signer(self, round_id: str) -> BlindSigner:
        """The key of a round, which is made by the first who asks."""
        if round_id in self._signers:
            return self._signers[round_id]
        path = self._folder(round_id) / "key"
        if not path.exists():
            self._first(path, BlindSigner.fresh().encode())
        with storage_errors(path, "read"):
            found = path.read_bytes()
        try:
            self._signers[round_id] = BlindSigner.decode(found)
        except MalformedError as error:
            raise StorageError(
                f"the admission key of a round is damaged: got {len(found)} bytes of something "
                "else; expected the key that was made for it; restore the file from a copy: a new "
                "key would make what was signed before worth nothing"
            ) from error
        return self._signers[round_id]

    def claim(self, round_id: str, device: str, asked: bytes) -> None:
        """Notes what a device has signed; raises ConflictError where it had something else."""
        path = self._folder(round_id) / f"of-{check_device_name(device)}"
        digest = sha256(asked).digest()
        self._first(path, digest)
        with storage_errors(path.parent, "read a file of"):
            if path.read_bytes() != digest:
                raise ConflictError(
                    "this device has its tokens of the round: got other ones to sign; expected the "
                    "same again, or none; use those that were signed, or wait for the next round"
                )

    def spend(self, round_id: str, nonces: Sequence[bytes]) -> None:
        """Takes tokens, all or none; raises ReplayError where one was taken before, here or by
        another process, and StorageError where none of them could be written down."""
        path = self._folder(round_id) / "spent"
        with self._lock, storage_errors(path, "write"):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, SECRET)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                known = self._known(round_id, descriptor)
                if len(set(nonces)) < len(nonces) or known & set(nonces):
                    raise ReplayError(
                        "a token was shown before: got one a second time; expected each once; show "
                        "another, or wait for the next round"
                    )
                _append(descriptor, len(known) * _NONCE, b"".join(nonces))
                known |= set(nonces)
            finally:
                os.close(descriptor)

    def _known(self, round_id: str, descriptor: int) -> set[bytes]:
        """Nonces that were taken, with those that others have written since."""
        known = self._spent.setdefault(round_id, set())
        start = len(known) * _NONCE
        found = os.pread(descriptor, max(0, os.fstat(descriptor).st_size - start), start)
        known |= {found[at : at + _NONCE] for at in range(0, len(found) - _NONCE + 1, _NONCE)}
        return known

    def _folder(self, round_id: str) -> Path:
        folder = self.directory / "admission" / round_id
        if not folder.is_dir():
            make_directory(folder.parent)
            with storage_errors(folder, "make"):
                folder.mkdir(0o700, exist_ok=True)
            self._forget(folder)
        return folder

    def _forget(self, newest: Path) -> None:
        """Removes what is kept of all rounds but the newest few."""
        others = [each for each in newest.parent.iterdir() if each != newest]
        others.sort(key=lambda each: number_of(each.name) or 0)
        for old in others[: 1 - _ROUNDS]:
            self._spent.pop(old.name, None)
            self._signers.pop(old.name, None)
            shutil.rmtree(old, ignore_errors=True)

    def _first(self, path: Path, content: bytes) -> None:
        """Writes a file unless it is there; of several at once, one wins."""
        if path.exists():
            return
        folder = path.parent  # names of files hold those of devices, which no error tells
        with storage_errors(folder, "write a file of"):
            sweep(folder)
            with passing_file(folder, content) as made, suppress(FileExistsError):
                path.hardlink_to(made)
            sync_directory(folder)


def _append(descriptor: int, end: int, content: bytes) -> None:
    """Writes behind what counts, over what a crash has left there, and waits for the disk; where
    that fails, nothing of it counts."""
    os.ftruncate(descriptor, end)
    os.lseek(descriptor, end, os.SEEK_SET)
    try:
        write_all(descriptor, [content])
        os.fsync(descriptor)
    except OSError:
        os.ftruncate(descriptor, end)
        raise


@dataclass
class KeysOf:
    """The keys of another service, asked for once a round and for nobody in particular."""

    client: HttpClient
    _known: dict[str, BlindPublic] = field(default_factory=dict)

    def public(self, round_id: str) -> BlindPublic:
        """Returns the key of a round."""
        if round_id not in self._known:
            got = self.client.get(admission_path(round_id), limit=MAX_CONFIG)
            kept = list(self._known.items())[1 - _ROUNDS :]
            self._known = {**dict(kept), round_id: BlindPublic.decode(bytes(got.body))}
        return self._known[round_id]


@dataclass
class BlindAdmission:
    """What one service does for devices without a name.

    Args:
        keys: those of the coordinator; None at the coordinator itself, which signs.
    """

    files: AdmissionFiles
    keys: KeysOf | None = None

    def public(self, round_id: str) -> BlindPublic:
        """The key of a round."""
        if self.keys is not None:
            return self.keys.public(round_id)
        return self.files.signer(round_id).public

    def sign(self, round_id: str, device: str, asked: bytes) -> bytes:
        """Answers blinded tokens of a device, up to `MAX_TOKENS`, once."""
        if self.keys is not None:
            raise NotFoundError(
                "this service signs no tokens: got blinded ones; expected the coordinator of the "
                "round; send them there"
            )
        if not asked or len(asked) % SIGNATURE_BYTES or len(asked) > MAX_TOKENS * SIGNATURE_BYTES:
            raise TooLargeError(
                f"another number of tokens than are signed: got {len(asked)} bytes; expected 1 to "
                f"{MAX_TOKENS} of {SIGNATURE_BYTES} bytes; ask for fewer"
            )
        signer = self.files.signer(round_id)
        self.files.claim(round_id, device, asked)
        places = range(0, len(asked), SIGNATURE_BYTES)
        return b"".join([signer.sign(asked[at : at + SIGNATURE_BYTES]) for at in places])

    def take(self, round_id: str, place: str, tokens: Sequence[bytes]) -> None:
        """Takes tokens, all or none; raises MalformedError or ReplayError."""
        key = self.public(round_id)
        nonces = [check_token(key, round_id, place, token) for token in tokens]
        self.files.spend(round_id, nonces)


def admission_routes(
    rounds: RoundSource, admission: BlindAdmission, server: int | None
) -> Callable[[Guards], Sequence[Route]]:
    """What makes an `App` admit devices without a name, as one of its `extra_routes`.

    Args:
        server: which server of private queries it is, where tokens are changed; None for none.
    """

    def make(guards: Guards) -> Sequence[Route]:
        made, path = _AdmissionRoutes(rounds, guards, admission, server), admission_path("{round}")
        found = [
            Route("admission key", ("GET",), path, made.key),
            Route("admission", ("POST",), path, made.sign),
        ]
        if server is not None:
            found.append(Route("redeem", ("POST",), redeem_path("{round}"), made.redeem))
        return found

    return make


@dataclass(frozen=True)
class _AdmissionRoutes:
    """Gives the key, signs, and changes a token for one without a name."""

    rounds: RoundSource
    guards: Guards
    admission: BlindAdmission
    server: int | None

    async def key(self, request: Request) -> Response:
        """The public key of a round: the same for everybody, without a token."""
        self.guards.count(request, None)
        found = await asyncio.to_thread(self.admission.public, self._round(request))
        return Response.of(200, [BINARY, NO_STORE], found.encoded)

    async def sign(self, request: Request) -> Response:
        """Signatures of the blinded tokens of one device of the round."""
        guards, round_id = self.guards, self._round(request)
        claims = guards.access.member(request.headers, round_id, guards.clock())
        guards.count(request, claims)
        guards.check_type(request)
        asked = bytes(await request.body(MAX_TOKENS * SIGNATURE_BYTES, guards.limits))
        found = await asyncio.to_thread(self.admission.sign, round_id, claims.device, asked)
        return Response.of(200, [BINARY, NO_STORE], found)

    async def redeem(self, request: Request) -> Response:
        """A token for the private queries of one round, to one who has a blind token."""
        guards, round_id, ring = self.guards, self._round(request), self.guards.access.keyring
        guards.count(request, None)
        guards.check_type(request)
        token = bytes(await request.body(TOKEN_BYTES, guards.limits))
        if ring is None or self.server is None:
            raise NotFoundError(
                "this service changes no tokens: got one; expected a server of private queries; "
                "check the address"
            )
        place = queries_at(self.server)
        await asyncio.to_thread(self.admission.take, round_id, place, [token])
        now, seconds = guards.clock(), guards.access.round_seconds
        name = f"guest-{secrets.token_hex(8)}"
        runs = guards.access.runs
        issued = ring.issue("query", name, now=now, seconds=seconds, round_id=round_id, runs=runs)
        return json_response({"token": issued})

    def _round(self, request: Request) -> str:
        """The round of a request, if it is here: no files are made for others."""
        round_id = parse_round(request.params[0])
        with self.rounds.hold(round_id):
            return round_id
