"""Pairs machines: `python -m hetero.pair` on one, `python -m hetero.pair join` on each of the others.

The first makes a secret and shows it as a pairing code; the others take the code from standard input, so that it is in
no command line, no history and no process list. `python -m hetero.pair machines` lists the workers that trained with
this machine.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from hetero.errors import ConfigError, show_address
from hetero.machines import remembered
from hetero.roles import is_here
from hetero.secret import from_code, new_secret, read_secret, secret_file, to_code, write_secret
from hetero.spec import WorkerEntry


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; 2 after a mistake."""
    parser = argparse.ArgumentParser(
        prog="python -m hetero.pair",
        description="Let the machines of one group know each other by a secret that only they have.",
    )
    parser.add_argument("action", nargs="?", choices=["show", "join", "machines"], default="show")
    parser.add_argument("--new", action="store_true", help="make a new secret; every machine has to join again")
    arguments = parser.parse_args(argv)
    file = secret_file()
    try:
        if arguments.action == "machines" and arguments.new:
            raise ConfigError("--new goes with show and join, got machines --new")
        if arguments.action == "machines":
            lines = [_shown(machine) for machine in remembered()]
        elif arguments.action == "join":
            lines = _join(file, replace=arguments.new)
        else:
            lines = _show(file, new=arguments.new)
    except ConfigError as exc:
        sys.stderr.write(f"error: {exc}\n")
        return 2
    except (KeyboardInterrupt, EOFError):
        sys.stderr.write("nothing was changed\n")
        return 130
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


def _shown(machine: WorkerEntry) -> str:
    """One machine; a worker on a loopback address needed no pairing."""
    local = ", on this machine" if is_here(machine.host, {"localhost"}) else ""
    return f"{machine.id}: {show_address(machine.host, machine.port)}, device {machine.device}{local}"


def _show(file: Path, *, new: bool) -> list[str]:
    secret = None if new else read_secret(file)
    made = secret is None
    if secret is None:
        secret = new_secret()
        write_secret(file, secret)
    join = "join --new" if new else "join"
    return [
        f"A new secret is in {file}." if made else f"This machine has a secret already, in {file}.",
        "",
        f"    {to_code(secret)}",
        "",
        f"On each of the other machines run   python -m hetero.pair {join}   and give it this code.",
        "Whoever has the code is a member of the group: send it by a way that you trust.",
        "Workers that are running have to be started again.",
    ]


def _join(file: Path, *, replace: bool) -> list[str]:
    if sys.stdin.isatty():
        sys.stdout.write("pairing code: ")
        sys.stdout.flush()
    secret = from_code(sys.stdin.readline())
    before = read_secret(file)
    if before == secret:
        return ["This machine has joined that group already."]
    if before is not None and not replace:
        raise ConfigError(
            f"this machine belongs to another group (its secret is {file}); python -m hetero.pair join --new leaves it"
        )
    write_secret(file, secret)
    return [
        f"Joined; the secret is in {file}.",
        "Start the worker with   python worker.py   : it prints the line for the coordinator.",
    ]


if __name__ == "__main__":
    raise SystemExit(main())
