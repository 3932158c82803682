"""Whether coordinator and worker are about to run the same thing; if not, what differs and what to do about it."""

from __future__ import annotations

import json
from collections.abc import Mapping

from hetero.fingerprint import difference
from hetero.versions import versions
from hetero.wire.headers import Welcome

_MAX_PARTS = 4096


def read_model(payload: bytes | memoryview) -> dict[str, str]:
    """A peer's fingerprint of its base model; empty where it sent none, or what is none."""
    try:
        found = json.loads(bytes(payload) or b"{}")
    except (ValueError, RecursionError):
        return {}
    if not isinstance(found, dict) or len(found) > _MAX_PARTS:
        return {}
    return {key: value for key, value in found.items() if isinstance(value, str) and len(value) <= 64}


def disagreement(digest: str, model: Mapping[str, str], welcome: Welcome, theirs: Mapping[str, str]) -> str | None:
    """Why this coordinator must not train with that worker; None where it may.

    Args:
        digest: of the spec here.
        model: fingerprint of the base model here.
        welcome: the worker's answer.
        theirs: fingerprint of the base model there.
    """
    mine, other = versions()["hetero"], welcome.versions.get("hetero", "none")
    if mine != other:
        older = "this machine" if _ordered(mine) < _ordered(other) else "that machine"
        return f"runs something else: hetero is {other} there and {mine} here; update the checkout on {older}"
    if digest != welcome.digest:
        return (
            f"reads the run differently: the spec's digest is {welcome.digest[:16]} there and {digest[:16]} here; "
            "the checkouts differ: git pull on both machines"
        )
    if found := difference(dict(model), dict(theirs)):
        return (
            f"has another base model: {found}; copy the model's folder from one machine to the other, or give both the "
            "same model.revision"
        )
    return None


def _ordered(version: str) -> tuple[int, ...]:
    return tuple(int(part) if part.isdecimal() else 0 for part in version.split("."))
