"""Keys for random numbers: a draw depends on what it is for, never on what was drawn before."""

import hashlib


def key64(*parts: object) -> int:
    """A 63-bit key, the same on every machine: first 8 bytes of SHA-256 of the joined parts, shifted right by one."""
    text = ":".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
