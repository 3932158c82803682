"""The secret of a group of machines: 32 random bytes in a file that only its owner reads, and its pairing code."""

import base64
import contextlib
import hashlib
import os
import secrets
import stat
import sys
import tempfile
from pathlib import Path

from hetero.errors import ConfigError

SECRET_BYTES = 32
_CHECK_BYTES = 3  # 35 bytes are 56 base32 characters without padding
_GROUP = 7


def config_dir() -> Path:
    """The user's configuration folder of hetero; it need not exist."""
    home = Path.home()
    return (home / "Library" / "Application Support" if sys.platform == "darwin" else home / ".config") / "hetero"


def secret_file(folder: Path | None = None) -> Path:
    """Where the secret of this user's machines is kept."""
    return (folder or config_dir()) / "secret"


def secret_of_this_machine(folder: Path | None = None) -> tuple[bytes, bool]:
    """The secret by which processes of this machine know each other, and whether it is that of a paired group.

    While the machine is not paired it has one of its own, made when it is first needed.

    Raises:
        ConfigError: a secret cannot be read or kept.
    """
    group = read_secret(secret_file(folder))
    if group is not None:
        return group, True
    own_file = secret_file(folder).with_name("secret-of-this-machine")
    own = read_secret(own_file)
    if own is None:
        write_secret(own_file, new_secret(), replace=False)
        own = read_secret(own_file)  # another process may have been the first to write it
    assert own is not None
    return own, False


def new_secret() -> bytes:
    """A fresh secret."""
    return secrets.token_bytes(SECRET_BYTES)


def read_secret(file: Path) -> bytes | None:
    """The secret in a file; None where there is no file.

    Raises:
        ConfigError: others may read it, or it does not hold 32 bytes.
    """
    try:
        with file.open("rb") as stream:
            mode = os.fstat(stream.fileno()).st_mode
            secret = stream.read(SECRET_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as exc:
        raise ConfigError(f"the secret {file} must be readable by its owner ({exc.strerror})") from None
    if stat.S_IMODE(mode) & 0o077:
        raise ConfigError(
            f"the secret {file} must be readable by its owner alone, its mode is {stat.S_IMODE(mode):04o}: chmod 600 "
            f"{file}, and pair anew (python -m hetero.pair --new) if others may have read it"
        )
    if len(secret) != SECRET_BYTES:
        raise ConfigError(
            f"the secret {file} must hold {SECRET_BYTES} bytes, got {len(secret)}: delete it and pair anew "
            "(python -m hetero.pair)"
        )
    return secret


def write_secret(file: Path, secret: bytes, *, replace: bool = True) -> None:
    """Keeps a secret, whole or not at all, readable by its owner alone.

    Args:
        file: where.
        secret: to keep.
        replace: False leaves a secret that is there already.

    Raises:
        ConfigError: the place cannot be written.
    """
    draft = None
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor, draft = tempfile.mkstemp(dir=file.parent, prefix=".secret.")  # mode 0600
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(secret)
            stream.flush()
            os.fsync(stream.fileno())
        if replace:
            Path(draft).replace(file)
        else:
            with contextlib.suppress(FileExistsError):
                os.link(draft, file)
    except OSError as exc:
        raise ConfigError(f"the folder {file.parent} must be writable ({exc.strerror})") from None
    finally:
        if draft is not None:
            Path(draft).unlink(missing_ok=True)


def to_code(secret: bytes) -> str:
    """The pairing code of a secret: base32 of it and a checksum, in groups."""
    text = base64.b32encode(secret + _checksum(secret)).decode()
    return "-".join(text[i : i + _GROUP] for i in range(0, len(text), _GROUP))


def from_code(code: str) -> bytes:
    """The secret of a pairing code; spaces, hyphens and small letters do not matter.

    Raises:
        ConfigError: it is not one, or has a typing mistake. The message does not repeat it.
    """
    text = "".join(code.split()).replace("-", "").upper()
    expected = 8 * (SECRET_BYTES + _CHECK_BYTES) // 5
    if len(text) != expected:
        raise ConfigError(f"a pairing code has {expected} letters and digits, got {len(text)}; copy all of it")
    try:
        raw = base64.b32decode(text)
    except ValueError:
        raise ConfigError("a pairing code holds only letters and the digits 2 to 7; copy it again") from None
    secret, check = raw[:SECRET_BYTES], raw[SECRET_BYTES:]
    if check != _checksum(secret):
        raise ConfigError("the pairing code's checksum is wrong: something is mistyped; compare it letter by letter")
    return secret


def _checksum(secret: bytes) -> bytes:
    return hashlib.sha256(b"hetero pairing code" + secret).digest()[:_CHECK_BYTES]
