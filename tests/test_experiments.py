"""The complete examples of conf/experiment compose, and stand up to every check that needs no file of the user's."""

from __future__ import annotations

import re

import pytest
from processes import REPO, composed, run_here

from hetero.config import SHAPES_DIR
from hetero.resolve import resolve

EXAMPLES = sorted(file.stem for file in (REPO / "conf" / "experiment").glob("*.yaml"))


def test_there_are_some() -> None:
    assert len(EXAMPLES) >= 4


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_is_a_whole_configuration_and_the_command_line_wins(name: str) -> None:
    rows = ["data.path=rows.jsonl"] if name in ("smollm2_lora", "llama8b_home") else []
    made = resolve(composed(f"experiment={name}", *rows, "loop.batch_size=32"), shapes_dir=SHAPES_DIR, for_drawing=True)
    assert made.config.run_name == name and made.config.loop.batch_size == 32
    assert len(made.stages) > 1


@pytest.mark.parametrize("name", EXAMPLES)
def test_commands_in_its_head_are_those_of_the_scripts(name: str) -> None:
    text = (REPO / "conf" / "experiment" / f"{name}.yaml").read_text(encoding="utf-8")
    assert text.startswith("# @package _global_\n# ")
    assert f"python train.py experiment={name}" in text


def test_an_example_is_chosen_as_on_the_command_line() -> None:
    outcome = run_here("train", "experiment=smollm2_qlora", "--cfg", "job")
    assert outcome.code == 0, outcome.text
    assert re.search(r"quantization: nf4", outcome.text) and "- 12" in outcome.text
