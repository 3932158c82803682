"""Secrets in what is shown or sent away: a key names them, or they stand in an address as user:password@."""

from __future__ import annotations

import re
from typing import Any

_KEY = re.compile(r"(?:^|[_.-])(?:api_?keys?|token|secrets?|passwords?|passwd|credentials?)$", re.IGNORECASE)
_IN_URL = re.compile(r"(?<=://)[^/\s@:]*:[^/\s@]*(?=@)")
_HIDDEN = "(hidden)"


def without_secrets(value: Any, key: str = "") -> Any:
    """Plain data as anybody may see it; what is secret is hidden at any depth.

    Args:
        value: lists, dicts and plain values; a text of the form KEY=VALUE is an override as it was typed.
        key: under which it stands.
    """
    if value is not None and _KEY.search(key):
        return _HIDDEN
    if isinstance(value, dict):
        return {name: without_secrets(item, str(name)) for name, item in value.items()}
    if isinstance(value, list):
        return [without_secrets(item) for item in value]
    if not isinstance(value, str):
        return value
    name, equals, _ = value.partition("=")
    return f"{name}={_HIDDEN}" if equals and _KEY.search(name.lstrip("+")) else _IN_URL.sub(_HIDDEN, value)
