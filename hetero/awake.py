"""Keeps a Mac from going to sleep while it trains; a sleeping machine is a lost peer to the others."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)

_END_S = 1.0


@contextmanager
def kept_awake(platform: str = sys.platform) -> Iterator[None]:
    """On macOS this machine does not go to sleep by itself within the block; elsewhere nothing is done.

    Closing the lid still sends it to sleep. Where the system's `caffeinate` cannot be started, the log says so and the
    block runs all the same.

    Args:
        platform: of this machine, as `sys.platform` names it.
    """
    process = _start(platform)
    try:
        yield
    finally:
        if process is not None:
            _end(process)


def _command(platform: str) -> list[str] | None:
    """-i: no sleep for being idle; -w: until this process has ended, so that it never outlives a killed one."""
    return ["caffeinate", "-i", "-w", str(os.getpid())] if platform == "darwin" else None


def _start(platform: str) -> subprocess.Popen[bytes] | None:
    command = _command(platform)
    if command is None:
        return None
    program = shutil.which(command[0])
    try:
        if program is None:
            raise FileNotFoundError(f"no {command[0]} on PATH")
        return subprocess.Popen(
            [program, *command[1:]], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
    except OSError as exc:
        logger.warning("this machine may go to sleep while it trains: %s", exc)
        return None


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(_END_S)
