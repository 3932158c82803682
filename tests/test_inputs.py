"""What the coordinator's own disk must hold: refused without torch, and only where it is wanted."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from processes import REPO, composed

from hetero.config import SHAPES_DIR
from hetero.errors import ConfigError
from hetero.inputs import check_inputs
from hetero.resolve import resolve


def check(*overrides: str) -> None:
    check_inputs(resolve(composed(*overrides), shapes_dir=SHAPES_DIR))


@pytest.mark.parametrize("content", [b"", b"\n \r\n", b"\xef\xbb\xbf"])
def test_empty_file_of_rows_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"^data\.path must be .* at least one row, got {file}, which is empty$"):
        check("data=jsonl", f"data.path={file}")
    file.write_bytes(b'{"text": "a"}')
    check("data=jsonl", f"data.path={file}")


def test_folder_of_rows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"^data\.path must be .* got the folder {tmp_path}; name the file in it"):
        check("data=jsonl", f"data.path={tmp_path}")


@pytest.mark.parametrize("typo", ["lastest", "Latest", "latst"])
def test_misspelt_latest_is_named(typo: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"^checkpoint\.resume must be latest, .* got '{typo}'; did you mean latest\?"
    ):
        check(f"checkpoint.resume={typo}")


def test_run_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"got '{tmp_path}/run': found nothing at {tmp_path}/run"):
        check(f"checkpoint.resume={tmp_path}/run")
    check(f"checkpoint.resume={tmp_path}")
    with pytest.raises(ConfigError, match="cannot be read: File name too long"):
        check(f"checkpoint.resume={'l' * 299}")


def test_nf4_without_its_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ConfigError, match=r"^quantization=nf4 on stage 1 .* needs the package bitsandbytes"):
        check(
            "shard_plan.stages=[{id: local, start: 0, end: 3}, {id: local-1, start: 3, end: 6, quantization: nf4}]",
            "shard_plan.num_stages=null",
            "adapter.modules_to_save=null",
        )


def test_worker_needs_none_of_it(tmp_path: Path) -> None:
    resolve(composed("data=jsonl", f"data.path={tmp_path}/no.jsonl", "checkpoint.resume=latst"), shapes_dir=SHAPES_DIR)


def test_it_imports_nothing_slow() -> None:
    code = (
        "import sys; import hetero.inputs, hetero.resolve;"
        "print(sorted({'torch', 'transformers', 'peft', 'datasets', 'safetensors'} & sys.modules.keys()))"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, timeout=60, check=True
    )
    assert found.stdout.strip() == "[]"
