"""The group's secret on the disk and as a pairing code."""

from __future__ import annotations

import base64
import os
import stat
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero import secret as secrets_module
from hetero.errors import ConfigError
from hetero.secret import (
    config_dir,
    from_code,
    new_secret,
    read_secret,
    secret_file,
    secret_of_this_machine,
    to_code,
    write_secret,
)

SECRET = bytes(range(32))


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


# --- on the disk -------------------------------------------------------------------------------------------------


def test_secret_comes_back_and_only_its_owner_can_read_it(tmp_path: Path) -> None:
    file = secret_file(tmp_path / "config" / "hetero")
    before = os.umask(0)
    try:
        write_secret(file, SECRET)
    finally:
        os.umask(before)
    assert read_secret(file) == SECRET
    assert mode_of(file) == 0o600 and mode_of(file.parent) == 0o700
    assert [entry.name for entry in file.parent.iterdir()] == ["secret"]


def test_secret_that_is_written_over_another_is_as_private(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_bytes(b"old")
    file.chmod(0o666)
    write_secret(file, SECRET)
    assert read_secret(file) == SECRET and mode_of(file) == 0o600


def test_no_file_is_no_secret(tmp_path: Path) -> None:
    assert read_secret(tmp_path / "secret") is None


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o660, 0o601, 0o620, 0o777])
def test_secret_that_others_may_use_is_refused_with_the_remedy(tmp_path: Path, mode: int) -> None:
    file = tmp_path / "secret"
    write_secret(file, SECRET)
    file.chmod(mode)
    with pytest.raises(ConfigError) as caught:
        read_secret(file)
    text = str(caught.value)
    assert f"its mode is {mode:04o}: chmod 600 {file}" in text and "python -m hetero.pair --new" in text


@pytest.mark.parametrize("content", [b"", b"short", SECRET[:31], SECRET + b"\n", SECRET.hex().encode(), bytes(1 << 20)])
def test_secret_of_another_length_is_refused_and_not_shown(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "secret"
    write_secret(file, content)
    with pytest.raises(ConfigError, match=r"must hold 32 bytes, got \d+: delete it and pair anew") as caught:
        read_secret(file)
    assert not content or content.hex()[:10] not in str(caught.value)


def test_secret_that_is_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "secret").mkdir()
    with pytest.raises(ConfigError, match="must be readable by its owner"):
        read_secret(tmp_path / "secret")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match="must be writable"):
        write_secret(tmp_path / "secret", SECRET)


def test_place_below_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"the folder .*/file/hetero must be writable"):
        write_secret(tmp_path / "file" / "hetero" / "secret", SECRET)


def test_interrupted_write_leaves_the_secret_of_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "secret"
    write_secret(file, SECRET)

    def fails(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(secrets_module.os, "fsync", fails)
    with pytest.raises(ConfigError, match="No space left"):
        write_secret(file, bytes(32))
    assert read_secret(file) == SECRET
    assert [entry.name for entry in tmp_path.iterdir()] == ["secret"]


# --- which one counts --------------------------------------------------------------------------------------------


def test_secret_lives_in_this_user_s_configuration(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert config_dir().is_relative_to(tmp_path) and secret_file() == config_dir() / "secret"
    assert not config_dir().exists()


def test_unpaired_machine_has_a_secret_of_its_own_and_keeps_it(tmp_path: Path) -> None:
    first, paired = secret_of_this_machine(tmp_path)
    assert (first, paired) == secret_of_this_machine(tmp_path) and not paired and len(first) == 32
    assert mode_of(tmp_path / "secret-of-this-machine") == 0o600
    assert not secret_file(tmp_path).exists()


def test_paired_machine_uses_the_group_s(tmp_path: Path) -> None:
    own, _ = secret_of_this_machine(tmp_path)
    write_secret(secret_file(tmp_path), SECRET)
    assert secret_of_this_machine(tmp_path) == (SECRET, True) and own != SECRET


def test_processes_that_start_together_agree_on_one_secret(tmp_path: Path) -> None:
    """The first start on a machine may be a coordinator's and a worker's at once."""
    found: list[bytes] = []
    gate = threading.Barrier(8)

    def ask() -> None:
        gate.wait(10)
        found.append(secret_of_this_machine(tmp_path)[0])

    for _ in range(20):
        for entry in tmp_path.iterdir():
            entry.unlink()
        found.clear()
        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert len(found) == 8 and len(set(found)) == 1


def test_damaged_group_secret_does_not_fall_back_to_another(tmp_path: Path) -> None:
    secret_of_this_machine(tmp_path)
    write_secret(secret_file(tmp_path), SECRET[:5])
    with pytest.raises(ConfigError, match="must hold 32 bytes"):
        secret_of_this_machine(tmp_path)


def test_new_secrets_differ() -> None:
    made = {new_secret() for _ in range(100)}
    assert len(made) == 100 and {len(one) for one in made} == {32}


# --- the pairing code --------------------------------------------------------------------------------------------


@given(st.binary(min_size=32, max_size=32))
def test_code_stands_for_its_secret_however_it_is_typed(secret: bytes) -> None:
    code = to_code(secret)
    plain = code.replace("-", "")
    assert len(plain) == 56 and [len(group) for group in code.split("-")] == [7] * 8
    assert base64.b32decode(plain)[:32] == secret
    for typed in (code, code.lower(), plain, f"  {code}\n", code.replace("-", " "), code.replace("-", "\t-\r\n")):
        assert from_code(typed) == secret


def test_every_mistyped_letter_and_every_swap_is_noticed() -> None:
    plain = to_code(SECRET).replace("-", "")
    wrong = {plain[:i] + letter + plain[i + 1 :] for i in range(len(plain)) for letter in "ABZ27"}
    wrong |= {plain[:i] + plain[i + 1] + plain[i] + plain[i + 2 :] for i in range(len(plain) - 1)}
    for code in wrong - {plain}:
        with pytest.raises(ConfigError, match="checksum is wrong") as caught:
            from_code(code)
        assert code not in str(caught.value)


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("", "has 56 letters and digits, got 0"),
        (to_code(SECRET)[:-1], "got 55"),
        (to_code(SECRET) + "A", "got 57"),
        ("A" * 1_000_000, "got 1000000"),
        ("0" * 56, "only letters and the digits 2 to 7"),
        ("ä" * 56, "only letters and the digits 2 to 7"),
        ("=" * 56, "only letters and the digits 2 to 7"),
        ("A" * 50 + "======", "checksum is wrong"),
        ("A" * 56, "checksum is wrong"),
    ],
)
def test_what_is_no_code_is_refused_without_being_repeated(code: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as caught:
        from_code(code)
    assert len(str(caught.value)) < 200 and (not code or code not in str(caught.value))


@given(st.text(max_size=80))
def test_any_text_is_a_code_or_a_mistake(text: str) -> None:
    error = ""
    try:
        assert to_code(from_code(text)).replace("-", "") == "".join(text.split()).replace("-", "").upper()
    except ConfigError as exc:
        error = str(exc)
    assert error.isprintable()
