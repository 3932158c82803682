"""Secrets do not reach a page or another program."""

from __future__ import annotations

from hetero.hiding import without_secrets


def test_values_whose_key_says_secret_are_hidden_at_any_depth() -> None:
    given = {
        "a": [{"api_key": "x", "max_tokens": 3}],
        "hf_token": "x",
        "tokens": 5,
        "token": None,
        "keys": {"secrets": [1]},
    }
    shown = given | {
        "a": [{"api_key": "(hidden)", "max_tokens": 3}],
        "hf_token": "(hidden)",
        "keys": {"secrets": "(hidden)"},
    }
    assert without_secrets(given) == shown
    assert without_secrets("x", "logger.own.password") == "(hidden)"


def test_overrides_as_they_were_typed_show_no_secret() -> None:
    given = ["+logger.own.password=x=y", "run_name=token", "a"]
    assert without_secrets(given) == ["+logger.own.password=(hidden)", "run_name=token", "a"]


def test_a_password_within_an_address_is_hidden() -> None:
    assert without_secrets({"url": "http://me:pw@host:80/a@b"}) == {"url": "http://(hidden)@host:80/a@b"}
    assert without_secrets(["data.path=https://me:pw@host/x"]) == ["data.path=https://(hidden)@host/x"]
    assert without_secrets("http://host/a:b@c") == "http://host/a:b@c"
