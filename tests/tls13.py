"""TLS 1.3 by hand (RFC 8446), as far as an impostor needs it: OpenSSL refuses to load a certificate with another's key.

One suite: X25519, Ed25519, TLS_AES_128_GCM_SHA256. Checks nothing of what the other side proves.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import struct
from collections.abc import Iterator

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

HANDSHAKE, APPLICATION, ALERT = 22, 23, 21
_SUITE, _GROUP, _ED25519 = 0x1301, 0x001D, 0x0807
_EMPTY = hashlib.sha256(b"").digest()


class Refused(Exception):
    """The other side sent an alert, or ended the connection."""


def _label(secret: bytes, label: bytes, context: bytes, length: int) -> bytes:
    """HKDF-Expand-Label (section 7.1); at most one block of SHA-256."""
    name = b"tls13 " + label
    info = struct.pack(">HB", length, len(name)) + name + bytes([len(context)]) + context
    return hmac.digest(secret, info + b"\1", "sha256")[:length]


class _Keys:
    """One direction's traffic keys."""

    def __init__(self, secret: bytes) -> None:
        self.secret, self._cipher = secret, AESGCM(_label(secret, b"key", b"", 16))
        self._iv, self._number = int.from_bytes(_label(secret, b"iv", b"", 12)), 0

    def _nonce(self) -> bytes:
        nonce = (self._iv ^ self._number).to_bytes(12)
        self._number += 1
        return nonce

    def seal(self, type_: int, content: bytes) -> bytes:
        """An encrypted record."""
        head = struct.pack(">BHH", APPLICATION, 0x0303, len(content) + 17)
        return head + self._cipher.encrypt(self._nonce(), content + bytes([type_]), head)

    def open(self, head: bytes, body: bytes) -> tuple[int, bytes]:
        """Type and content of an encrypted record."""
        inner = self._cipher.decrypt(self._nonce(), body, head).rstrip(b"\0")
        return inner[-1], inner[:-1]

    def finished(self, transcript: bytes) -> bytes:
        """The content of a Finished message."""
        return hmac.digest(_label(self.secret, b"finished", b"", 32), hashlib.sha256(transcript).digest(), "sha256")


class Tls13:
    """A side of a connection that shows one certificate and signs with one key, whether they belong together or not."""

    def __init__(self, sock: socket.socket, certificate: bytes, key: Ed25519PrivateKey) -> None:
        self._sock, self._certificate, self._key = sock, certificate, key
        self._share = X25519PrivateKey.generate()
        self._transcript = b""
        self._messages = b""  # handshake bytes that have come and are not taken yet
        self._reading: _Keys | None = None

    def connect(self) -> None:
        """The client's side of the handshake; done as soon as its Finished is sent."""
        share = self._share.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
        extensions = (
            _extension(43, b"\x02\x03\x04")
            + _extension(13, struct.pack(">HH", 2, _ED25519))
            + _extension(10, struct.pack(">HH", 2, _GROUP))
            + _extension(51, struct.pack(">HHH", 36, _GROUP, 32) + share)
        )
        hello = b"\x03\x03" + os.urandom(32) + b"\0" + struct.pack(">HH", 2, _SUITE) + b"\x01\0"
        first = self._note(1, hello + struct.pack(">H", len(extensions)) + extensions)
        self._sock.sendall(struct.pack(">BHH", HANDSHAKE, 0x0301, len(first)) + first)
        _, answer = self._take()
        server, client, master = self._derive(_share_of(answer, is_server_hello=True))
        self._reading = server
        context = b""
        while True:
            kind, body = self._take()
            if kind == 13:
                context = body[1 : 1 + body[0]]
            if kind == 20:
                break
        ends = [_Keys(_label(master, name, self._digest(), 32)) for name in (b"c ap traffic", b"s ap traffic")]
        self._prove(client, context, b"client")
        self._writing, self._reading = ends

    def accept(self) -> None:
        """The server's side of the handshake, up to the client's Finished."""
        _, hello = self._take()
        session = hello[34 : 35 + hello[34]]
        share = self._share.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
        extensions = _extension(43, b"\x03\x04") + _extension(51, struct.pack(">HH", _GROUP, 32) + share)
        answer = b"\x03\x03" + os.urandom(32) + session + struct.pack(">HB", _SUITE, 0)
        theirs = _share_of(hello, is_server_hello=False)
        first = self._note(2, answer + struct.pack(">H", len(extensions)) + extensions)
        self._sock.sendall(struct.pack(">BHH", HANDSHAKE, 0x0303, len(first)) + first)
        server, client, master = self._derive(theirs)
        algorithms = _extension(13, struct.pack(">HH", 2, _ED25519))
        opening = self._note(8, b"\0\0") + self._note(13, b"\0" + struct.pack(">H", len(algorithms)) + algorithms)
        self._sock.sendall(server.seal(HANDSHAKE, opening))
        self._prove(server, b"", b"server")
        ends = [_Keys(_label(master, name, self._digest(), 32)) for name in (b"s ap traffic", b"c ap traffic")]
        self._reading = client
        while self._take()[0] != 20:
            pass
        self._writing, self._reading = ends

    def send(self, content: bytes) -> None:
        """Application data."""
        self._sock.sendall(self._writing.seal(APPLICATION, content))

    def receive(self) -> bytes:
        """The next application data."""
        while True:
            type_, content = self._record()
            if type_ == APPLICATION:
                return content

    def _prove(self, keys: _Keys, context: bytes, side: bytes) -> None:
        """Certificate, CertificateVerify and Finished."""
        entry = len(self._certificate).to_bytes(3) + self._certificate + b"\0\0"
        shown = self._note(11, bytes([len(context)]) + context + len(entry).to_bytes(3) + entry)
        signed = b" " * 64 + b"TLS 1.3, " + side + b" CertificateVerify\0" + self._digest()
        signature = self._key.sign(signed)
        shown += self._note(15, struct.pack(">HH", _ED25519, len(signature)) + signature)
        shown += self._note(20, keys.finished(self._transcript))
        self._sock.sendall(keys.seal(HANDSHAKE, shown))

    def _derive(self, theirs: bytes) -> tuple[_Keys, _Keys, bytes]:
        """Keys of the server's and the client's handshake, and the master secret (section 7.1)."""
        early = hmac.digest(bytes(32), bytes(32), "sha256")
        shared = self._share.exchange(X25519PublicKey.from_public_bytes(theirs))
        secret = hmac.digest(_label(early, b"derived", _EMPTY, 32), shared, "sha256")
        server, client = (_Keys(_label(secret, side + b" hs traffic", self._digest(), 32)) for side in (b"s", b"c"))
        return server, client, hmac.digest(_label(secret, b"derived", _EMPTY, 32), bytes(32), "sha256")

    def _note(self, kind: int, body: bytes) -> bytes:
        message = bytes([kind]) + len(body).to_bytes(3) + body
        self._transcript += message
        return message

    def _digest(self) -> bytes:
        return hashlib.sha256(self._transcript).digest()

    def _take(self) -> tuple[int, bytes]:
        """The next handshake message."""
        while len(self._messages) < 4 or len(self._messages) < 4 + int.from_bytes(self._messages[1:4]):
            type_, content = self._record()
            if type_ == HANDSHAKE:
                self._messages += content
        end = 4 + int.from_bytes(self._messages[1:4])
        message, self._messages = self._messages[:end], self._messages[end:]
        self._transcript += message
        return message[0], message[4:]

    def _record(self) -> tuple[int, bytes]:
        head = self._exactly(5)
        body = self._exactly(int.from_bytes(head[3:]))
        type_ = head[0]
        if type_ == APPLICATION and self._reading is not None:
            type_, body = self._reading.open(head, body)
        if type_ == ALERT:
            raise Refused(f"alert {body.hex()}")
        return type_, body

    def _exactly(self, count: int) -> bytes:
        found = b""
        while len(found) < count:
            if not (more := self._sock.recv(count - len(found))):
                raise Refused("the connection ended")
            found += more
        return found


def _extension(number: int, body: bytes) -> bytes:
    return struct.pack(">HH", number, len(body)) + body


def _share_of(hello: bytes, *, is_server_hello: bool) -> bytes:
    """The X25519 key in a hello."""
    at = 35 + hello[34]
    if is_server_hello:
        at += 3
    else:
        at += 2 + int.from_bytes(hello[at : at + 2])
        at += 1 + hello[at]
    for number, body in _pairs(hello[at + 2 :]):
        if number == 51:
            shares = body if is_server_hello else body[2:]
            return next(key for group, key in _pairs(shares) if group == _GROUP)
    raise Refused("there is no key share")


def _pairs(raw: bytes) -> Iterator[tuple[int, bytes]]:
    """(number, content) of everything in a list of extensions or key shares."""
    while raw:
        number, length = struct.unpack(">HH", raw[:4])
        yield number, raw[4 : 4 + length]
        raw = raw[4 + length :]
