"""Issues certificates of an authority that lives as long as one deployment is provisioned.

Its key is in memory alone, and gone with the process: nobody can issue further ones. Devices trust
the authority's certificate for this deployment, and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_DAYS = 365
_EARLY = timedelta(hours=1)  # clocks of devices may be behind


@dataclass(frozen=True, repr=False)
class Issued:
    """A private key and its certificate, or the request for one, as PEM."""

    key: bytes
    certificate: bytes


@dataclass(frozen=True, repr=False)
class Authority:
    """Whom all parties of a deployment trust to say who is who."""

    _key: ec.EllipticCurvePrivateKey
    _name: x509.Name
    certificate: bytes

    @staticmethod
    def fresh() -> Authority:
        """Returns a new one."""
        key = ec.generate_private_key(ec.SECP256R1())
        name = _named("keyhole deployment")
        made = (
            _builder(name, name, key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_USED_TO_SIGN, critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False)
            .sign(key, hashes.SHA256())
        )
        return Authority(key, name, made.public_bytes(serialization.Encoding.PEM))

    def issue(self, host: str, *, only_request: bool = False) -> Issued:
        """Returns a new key with its certificate for a host, or with a request for one."""
        key = ec.generate_private_key(ec.SECP256R1())
        hosts = x509.SubjectAlternativeName([_host(host)])
        pem = serialization.Encoding.PEM
        if only_request:
            request = x509.CertificateSigningRequestBuilder().subject_name(_named(host))
            request = request.add_extension(hosts, critical=False)
            made = request.sign(key, hashes.SHA256()).public_bytes(pem)
        else:
            signed_by = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
            certificate = (
                _builder(_named(host), self._name, key.public_key())
                .add_extension(hosts, critical=False)
                .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
                .add_extension(signed_by, critical=False)
                .sign(self._key, hashes.SHA256())
            )
            made = certificate.public_bytes(pem)
        plain = serialization.NoEncryption()
        private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain)
        return Issued(private, made)


_USED_TO_SIGN = x509.KeyUsage(
    digital_signature=False,
    content_commitment=False,
    key_encipherment=False,
    data_encipherment=False,
    key_agreement=False,
    key_cert_sign=True,
    crl_sign=False,
    encipher_only=False,
    decipher_only=False,
)


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _EARLY)
        .not_valid_after(now + timedelta(days=_DAYS))
    )
