"""Where a service is, and how a device knows that it is the right one: URL and certificates."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

from keyhole.errors import InputError, ServiceError

__all__ = ["Certificate", "not_trusted", "parse_url", "tls_context"]


@dataclass(frozen=True)
class Certificate:
    """What a device shows where the service asks for mutual TLS: PEM files."""

    file: Path
    key: Path


def parse_url(url: str, insecure: bool) -> tuple[str, int, str, bool]:
    """Host, port, prefix of paths, and whether TLS is spoken."""
    try:
        parts = urlsplit(url)
        host, port = (parts.hostname or "").encode("idna").decode(), parts.port
    except ValueError:  # UnicodeError is one: of labels that are empty or too long
        parts, host, port = urlsplit(""), "", None
    is_known = parts.scheme in ("http", "https") and not (parts.query or parts.username)
    if not (is_known and host and _is_visible(host + parts.path)):
        raise InputError(
            "not the URL of a service",
            got=repr(url),
            allowed="https://host[:port][/prefix]",
            fix="pass the address that the operator gave",
        )
    is_tls = parts.scheme == "https"
    if not (is_tls or insecure or _is_loopback(host)):
        raise InputError(
            "tokens and keys would travel in the clear",
            got=f"http to {host}",
            allowed="https, or http on this machine",
            fix="use https, or pass --insecure (insecure=True) where the network itself is safe",
        )
    return host, port or (443 if is_tls else 80), parts.path.rstrip("/"), is_tls


def _is_visible(text: str) -> bool:
    """Whether it can stand in the head of a request."""
    return text.isascii() and text.isprintable() and " " not in text


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def tls_context(ca: Path | str | None, certificate: Certificate | None) -> ssl.SSLContext:
    """How a device speaks TLS: whom it trusts, and what it shows.

    Raises:
        InputError: a file cannot be read.
    """
    try:
        context = ssl.create_default_context(cafile=None if ca is None else str(ca))
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if certificate is not None:
            context.load_cert_chain(certificate.file, certificate.key)
    except OSError as error:  # SSLError is one
        raise InputError(
            "a certificate cannot be read",
            got=str(error),
            allowed="PEM files",
            fix="check the files of --ca, --cert and --key",
        ) from error
    return context


def not_trusted(error: ssl.SSLCertVerificationError) -> ServiceError:
    """The error of a service that is not who it should be."""
    return ServiceError(
        "the certificate of the service is not trusted",
        got=error.verify_message,
        allowed="one that an authority of --ca has signed, for the host of the URL",
        fix="pass the operator's authority, and the host name as the certificate has it",
    )
