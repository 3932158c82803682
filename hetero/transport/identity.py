"""Who may talk: one identity that all members of a group derive from their secret, and mutual TLS 1.3 with it.

    secret --HKDF-SHA256--> Ed25519 key --> a self-signed certificate with fixed serial number and validity

Ed25519 signatures are deterministic (RFC 8032), so every member has the same certificate to the last byte. Each side
demands the other's certificate and compares it with its own: whoever does not have the secret has no key for it.
"""

from __future__ import annotations

import datetime
import hmac
import secrets
import ssl
import tempfile
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.x509.oid import NameOID

from hetero.errors import PeerError

_PURPOSE = b"hetero group identity v1"


@dataclass(frozen=True)
class Identity:
    """The TLS contexts of a group's member.

    Attributes:
        certificate: DER bytes of the certificate that every member has.
        server: for accepted connections.
        client: for dialled connections.
    """

    certificate: bytes
    server: ssl.SSLContext
    client: ssl.SSLContext

    def check_peer(self, tls: ssl.SSLSocket | ssl.SSLObject) -> None:
        """Compares the peer's certificate with the group's, after the handshake.

        Raises:
            PeerError: it is another one, or the connection is not TLS 1.3.
        """
        theirs = tls.getpeercert(binary_form=True) or b""
        if tls.version() != "TLSv1.3" or not hmac.compare_digest(theirs, self.certificate):
            raise PeerError("is not a member of this group: it does not have the same secret (python -m hetero.pair)")


def identity_of(secret: bytes) -> Identity:
    """The identity that a secret stands for."""
    seed = HKDF(algorithm=hashes.SHA256(), length=32, salt=None, info=_PURPOSE).derive(secret)
    key = Ed25519PrivateKey.from_private_bytes(seed)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "hetero")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(datetime.datetime(2020, 1, 1))  # fixed: the clock of a home machine may be wrong
        .not_valid_after(datetime.datetime(2120, 1, 1))
        .sign(key, None)
    )
    der = certificate.public_bytes(serialization.Encoding.DER)
    contexts = [_context(side, key, certificate, der) for side in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT)]
    contexts[0].num_tickets = 0  # no resumption: every connection proves the secret
    return Identity(der, *contexts)


def _context(side: int, key: Ed25519PrivateKey, certificate: x509.Certificate, der: bytes) -> ssl.SSLContext:
    context = ssl.SSLContext(side)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=der)
    _load_chain(context, key, certificate)
    return context


def _load_chain(context: ssl.SSLContext, key: Ed25519PrivateKey, certificate: x509.Certificate) -> None:
    """Gives OpenSSL the key, which it takes from a file only: encrypted there, with a password that is never kept."""
    password = secrets.token_bytes(32).hex().encode()
    pem = certificate.public_bytes(serialization.Encoding.PEM) + key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(password),
    )
    with tempfile.TemporaryDirectory(prefix="hetero-") as folder:
        file = Path(folder) / "identity.pem"
        file.touch(mode=0o600)
        file.write_bytes(pem)
        context.load_cert_chain(file, password=password)
