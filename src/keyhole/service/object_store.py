"""Reads and writes rounds under a URL, in S3-compatible storage or in a directory.

The store is a way for whole files between machines that run the service. It holds what a rounds
directory holds, under the same names: `current.json` and `rounds/<id>/...`. Every object appears
whole or not at all.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from keyhole.errors import DamageError, InputError, KeyholeError, NotFoundError, ServiceError

if TYPE_CHECKING:
    from obstore.store import ObjectStore

IMMUTABLE = "public, max-age=31536000, immutable, no-transform"
MUTABLE = "no-store"
"""Cache-control of the one object that is replaced."""

_CHUNK = 8 << 20  # of a streamed upload: S3 takes 10,000 parts, so segments up to 80 GB
_AT_ONCE = 4  # chunks of one upload under way: what is held in memory is their product
_MAX_TEXT = 160  # of what a store says, in one of our messages


@dataclass(frozen=True)
class StoreSettings:
    """How to reach a store.

    What is not set here comes from the environment, as for other tools: AWS_ACCESS_KEY_ID,
    AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN, AWS_REGION, AWS_ENDPOINT_URL. Secrets are best left
    there.
    """

    endpoint: str | None = None  # address of a store that is not Amazon's; may be plain HTTP
    region: str | None = None
    is_anonymous: bool = False  # sends no signature, for buckets that everyone may read
    retries: int = 8  # how often one request is tried again, with back-off
    retry_seconds: float = 120.0  # after which a request is given up
    # further settings, by the names obstore has for them
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RoundStore:
    """The objects below one URL."""

    url: str  # as the user gave it, for messages
    objects: ObjectStore
    keeps_attributes: bool  # whether objects can carry cache-control

    @cached_property
    def place(self) -> str:
        """The URL without name, password or query, which may be secrets."""
        parts = urlsplit(self.url)
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"

    def put(self, name: str, data: bytes | Path, cache: str = IMMUTABLE) -> None:
        """Stores bytes or a file, a long one in parts; memory holds a few of them."""
        from obstore import put

        attributes: Any = {"Cache-Control": cache} if self.keeps_attributes else None
        parts: Any = {"chunk_size": _CHUNK, "max_concurrency": _AT_ONCE}
        with self.errors(f"store {name}"):
            put(self.objects, name, data, attributes=attributes, **parts)

    def get(self, name: str, limit: int) -> bytes:
        """Returns a small object."""
        from obstore import get

        with self.errors(f"fetch {name}"):
            found = get(self.objects, name)
            if found.meta["size"] > limit:
                raise _damaged(name, f"{found.meta['size']} bytes", f"at most {limit}")
            return bytes(found.bytes())

    def stream(self, name: str, size: int) -> Iterator[memoryview]:
        """Gives the bytes of an object, piece by piece; that it is there is known before them."""
        from obstore import get

        with self.errors(f"fetch {name}"):
            found = get(self.objects, name)
            if found.meta["size"] != size:
                raise _damaged(name, f"{found.meta['size']} bytes", f"{size} bytes")

        def pieces() -> Iterator[memoryview]:
            with self.errors(f"fetch {name}"):
                for chunk in found.stream(min_chunk_size=1 << 20):
                    yield memoryview(chunk)

        return pieces()

    def sizes(self, prefix: str) -> dict[str, int]:
        """Returns name -> size of all objects whose name begins with the folders of `prefix`."""
        from obstore import list as list_objects

        with self.errors(f"list {prefix}"):
            batches = list_objects(self.objects, prefix)
            return {item["path"]: item["size"] for batch in batches for item in batch}

    def delete(self, names: Iterable[str]) -> None:
        """Removes objects, in order; those that are not there count as removed."""
        from obstore import delete

        for name in names:
            with self.errors(f"remove {name}"), suppress(FileNotFoundError):
                delete(self.objects, name)

    @contextmanager
    def errors(self, doing: str) -> Iterator[None]:
        """Turns what the library raises into errors of ours, of one line each."""
        from obstore.exceptions import BaseError

        try:
            yield
        except KeyholeError:
            raise
        except (BaseError, OSError, NotImplementedError, ValueError) as error:
            raise _explain(error, f"cannot {doing}", self.place) from error


def open_store(url: str, settings: StoreSettings | None = None) -> RoundStore:
    """Opens what lies below a URL; nothing is sent yet."""
    settings = settings or StoreSettings()
    try:
        from obstore.exceptions import BaseError
        from obstore.store import LocalStore, from_url
    except ImportError as error:
        raise InputError(
            f"object stores need a package that is missing: got {error!s}; expected obstore "
            "0.12 or newer; pip install 'keyhole[s3]'"
        ) from error
    try:
        objects = from_url(url, **_library_settings(url, settings))
    except (BaseError, ValueError, TypeError, OSError) as error:
        raise InputError(
            f"cannot open this object store: got {_first_line(error)}; expected "
            "s3://bucket/prefix, file:///directory and the like; check the URL and the settings"
        ) from error
    return RoundStore(url, objects, keeps_attributes=not isinstance(objects, LocalStore))


def _library_settings(url: str, settings: StoreSettings) -> dict[str, Any]:
    """The settings by the library's names; a directory has none but that it may be made."""
    if url.startswith("file:"):
        return {"mkdir": True}
    named = {
        "endpoint": settings.endpoint,
        "region": settings.region,
        "skip_signature": settings.is_anonymous or None,
    }
    found: dict[str, Any] = {name: value for name, value in named.items() if value is not None}
    found["retry_config"] = {
        "max_retries": settings.retries,
        "retry_timeout": timedelta(seconds=settings.retry_seconds),
    }
    if (settings.endpoint or "").startswith("http://"):
        found["client_options"] = {"allow_http": True}
    return {**found, **settings.options}


def _explain(error: Exception, wrong: str, place: str) -> KeyholeError:
    """The error of ours that says the same; the library has few kinds, so its text decides."""
    from obstore.exceptions import PermissionDeniedError, UnauthenticatedError

    text, said = str(error), _first_line(error)
    if "NoSuchBucket" in text:
        return InputError(
            f"{wrong}: there is no such bucket: got {place}; expected a bucket that exists; make "
            "the bucket, or correct the URL"
        )
    if "BadScheme" in text:
        return InputError(
            f"{wrong}: the address of the store is not https: got {place}; expected https, or "
            "plain http on purpose; give the address with --endpoint, or set AWS_ALLOW_HTTP=true"
        )
    if isinstance(error, FileNotFoundError):
        return NotFoundError(
            f"{wrong}: got nothing in {place}; expected a stored round; push the round, or try "
            "again"
        )
    refusals = PermissionDeniedError | UnauthenticatedError | PermissionError
    # Machines in a cloud can ask their surroundings for credentials: that is what failed here.
    asked = "/latest/api/token" in text or "/latest/meta-data/" in text
    if asked or isinstance(error, refusals):
        return InputError(
            f"{wrong}: no credentials, or the store does not accept them: got {said}; expected "
            f"credentials that may use {place}; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
            "or go without (anonymous)"
        )
    return ServiceError(
        f"{wrong}: got {said}; expected a store that answers at {place}; check it and try again"
    )


def _first_line(error: Exception) -> str:
    """The reason a library gives, without debug output, markup and how often it has tried."""
    line = re.sub(r"<\?xml.*", "", str(error).partition("\n")[0])
    code = re.search(r"<Code>(\w+)</Code>", str(error))
    reason = line.rpartition(" - ")[2].strip(" :")
    return f"{reason[:_MAX_TEXT]}{f' ({code[1]})' if code else ''}"


def _damaged(name: str, got: str, allowed: str) -> DamageError:
    return DamageError(
        f"the store holds a damaged {name}: got {got}; expected {allowed}; push the round again"
    )
