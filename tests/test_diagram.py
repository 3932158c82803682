"""Pictures of a plan: every format, with and without renderers (cases V01, V02), and beside a run that starts."""

from __future__ import annotations

import dataclasses
import html.parser
import io
import json
import logging
import os
import re
import shutil
import subprocess
import time
import xml.etree.ElementTree as ET
import zlib
from pathlib import Path
from typing import Any

import pytest
from diagrams import HIDDEN, ODD, plan, with_program, without_dot, without_packages

from hetero import diagram
from hetero.config import SHAPES_DIR
from hetero.diagram import FORMATS, OF_A_RUN, drawn_beside, formats_of, write_diagrams
from hetero.diagram_page import html_page
from hetero.diagram_svg import memory_parts, svg
from hetero.diagram_text import JOINER, dot, mermaid, width_of, wrapped
from hetero.errors import ConfigError
from hetero.memory import RunMemory, memory_of
from hetero.plan_view import PlanView, view_of
from hetero.resolve import ResolvedRun

SVG = "{http://www.w3.org/2000/svg}"
needs_dot = pytest.mark.skipif(shutil.which("dot") is None, reason="no Graphviz program `dot`")


@pytest.fixture(scope="module")
def run() -> ResolvedRun:
    """Three stages on machines with and without known memory, with a tied head."""
    machines = {"coordinator": {"host": "mac.lan", "memory_gb": 0.6}}
    return plan("a <b>", "end", model="smollm2_135m", **machines)


@pytest.fixture(scope="module")
def memory(run: ResolvedRun) -> RunMemory:
    return memory_of(run, SHAPES_DIR)


@pytest.fixture(scope="module")
def view(run: ResolvedRun, memory: RunMemory) -> PlanView:
    return view_of(run, memory)


def only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, renderer: str) -> None:
    """Leaves one renderer, or none."""
    if renderer == "dot":
        if shutil.which("dot") is None:
            pytest.skip("no Graphviz program `dot`")
        without_packages(monkeypatch)
        return
    without_dot(monkeypatch, tmp_path)
    if renderer == "none":
        without_packages(monkeypatch)
    else:
        for name in HIDDEN:
            pytest.importorskip(name)


@pytest.mark.parametrize("renderer", ["dot", "packages"])
def test_every_format_is_what_its_ending_says_and_the_same_run_gives_the_same_bytes(
    run: ResolvedRun, memory: RunMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, renderer: str
) -> None:
    only(monkeypatch, tmp_path, renderer)
    first = write_diagrams(run, tmp_path / "a", memory)
    assert [path.suffix for path in first] == list(FORMATS.values())
    begins = {".svg": b"<svg ", ".html": b"<!DOCTYPE html>", ".mmd": b"flowchart LR\n", ".dot": b"digraph "}
    begins |= {".png": b"\x89PNG\r\n\x1a\n", ".pdf": b"%PDF-1."}
    assert all(path.read_bytes().startswith(begins[path.suffix]) for path in first)
    time.sleep(1.1)  # a date in a file would be another one
    second = write_diagrams(run, tmp_path / "b", memory)
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == sorted(path.name for path in first)


def test_without_a_renderer_the_rest_is_drawn_and_what_would_help_is_said(
    run: ResolvedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    only(monkeypatch, tmp_path, "none")
    assert [path.suffix for path in write_diagrams(run, tmp_path)] == [".svg", ".html", ".mmd", ".dot"]
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    for suffix, line in zip(("png", "pdf"), caplog.messages, strict=True):
        assert re.search(rf"{suffix} needs a renderer .*install Graphviz .*pip install resvg-py", line)


@pytest.mark.parametrize("formats", [["png", "svg"], list(FORMATS)])
def test_format_that_was_asked_for_and_cannot_be_made_fails_after_the_others_are_written(
    run: ResolvedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, formats: list[str]
) -> None:
    only(monkeypatch, tmp_path, "none")
    with pytest.raises(ConfigError, match=r"^format png needs a renderer .*pip install .*written: .*architecture\.svg"):
        write_diagrams(run, tmp_path / "out", formats=formats)
    made = {path.suffix for path in (tmp_path / "out").iterdir()}
    assert made == {FORMATS[name] for name in formats} - {".png", ".pdf"}


def test_renderer_that_fails_is_named_where_no_other_is_there(
    run: ResolvedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_program(monkeypatch, tmp_path, "echo 'libgvc is broken' >&2; exit 3")
    without_packages(monkeypatch)
    with pytest.raises(ConfigError, match=r"format png needs a renderer \(.*libgvc is broken\)"):
        write_diagrams(run, tmp_path / "a.png")


def test_renderer_that_fails_gives_way_to_the_next(
    run: ResolvedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("resvg_py")
    with_program(monkeypatch, tmp_path, "exit 3")
    (path,) = write_diagrams(run, tmp_path / "a.png")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_pdf_of_the_packages_shows_the_picture_and_its_table_leads_to_every_object(
    run: ResolvedRun, memory: RunMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    only(monkeypatch, tmp_path, "packages")
    resvg: Any = pytest.importorskip("resvg_py")
    image: Any = pytest.importorskip("PIL.Image")
    pdf = write_diagrams(run, tmp_path / "a.pdf", memory)[0].read_bytes()
    start = int(re.findall(rb"startxref\n(\d+)\n%%EOF", pdf)[0])
    offsets = [int(found) for found in re.findall(rb"(\d{10}) 00000 n ", pdf[start:])]
    assert [pdf[at : at + 7] for at in offsets] == [b"%d 0 obj" % number for number in range(1, len(offsets) + 1)]
    stream = re.search(rb"/FlateDecode /Length (\d+) >>\nstream\n", pdf)
    assert stream is not None
    pixels = zlib.decompress(pdf[stream.end() : stream.end() + int(stream[1])])
    drawn = bytes(resvg.svg_to_bytes(svg_string=svg(view_of(run, memory)), zoom=2, background="white"))
    assert pixels == image.open(io.BytesIO(drawn)).convert("RGB").tobytes()


def texts_of(element: ET.Element) -> list[str]:
    """Text of each <text> below an element."""
    return [node.text or "" for node in element.iter(f"{SVG}text")]


@pytest.mark.parametrize("name", ODD)
def test_svg_shows_any_name_literally_and_links_join_their_stages(name: str) -> None:
    root = ET.fromstring(svg(view_of(plan(name, "other"))))
    stages = [node for node in root.iter(f"{SVG}g") if node.get("class") == "pv-stage"]
    shown = "".join(texts_of(stages[1]))
    assert shown.startswith(f"stage 1: {name}") and stages[1].findtext(f"{SVG}title") == f"stage 1: {name}"
    assert [node.get("id") for node in stages] == ["stage-0", "stage-1", "stage-2"]
    links = [node.get("id") for node in root.iter(f"{SVG}g") if node.get("class") == "pv-link"]
    assert links == ["link-0-1", "link-1-2"]


def test_svg_escapes_what_xml_forbids_or_what_would_turn_the_text_around() -> None:
    root = ET.fromstring(svg(view_of(plan("a\x00b\tc\u202ed\ufffee"))))
    assert "a\\x00b\\tc\\u202ed\\ufffee" in "".join(texts_of(root))


@pytest.mark.parametrize("count", range(9))
def test_svg_keeps_cards_apart_in_the_picture_and_arrows_between_neighbours(count: int) -> None:
    resolved = plan(*(f"machine {number} {'x' * 40 * number}" for number in range(count)), model="smollm2_135m")
    root = ET.fromstring(svg(view_of(resolved)))
    width, height = float(root.get("width", 0)), float(root.get("height", 0))
    cards = []
    for group in root.iter(f"{SVG}g"):
        if group.get("class") == "pv-stage":
            x, y = map(float, re.findall(r"[\d.]+", group.get("transform", "")))
            rect = next(group.iter(f"{SVG}rect"))
            cards.append((x, y, x + float(rect.get("width", 0)), y + float(rect.get("height", 0))))
            assert all(float(node.get("y", 0)) < cards[-1][3] - y for node in group.iter(f"{SVG}text"))
    assert len(cards) == count + 1
    assert all(x >= 0 and y >= 0 and right <= width and bottom <= height for x, y, right, bottom in cards)
    for index, a in enumerate(cards):
        for b in cards[index + 1 :]:
            assert a[2] < b[0] or b[2] < a[0] or a[3] < b[1] or b[3] < a[1]
    for index in range(count):
        (link,) = [node for node in root.iter(f"{SVG}g") if node.get("id") == f"link-{index}-{index + 1}"]
        forward = [path.get("d", "") for path in link.iter(f"{SVG}path")][:2]
        begin = tuple(map(float, re.findall(r"[\d.]+", forward[0])[:2]))
        end = tuple(map(float, re.findall(r"[\d.]+", forward[1])[:2]))
        assert distance(begin, cards[index]) == distance(end, cards[index + 1]) == 8


def distance(point: tuple[float, ...], card: tuple[float, float, float, float]) -> float:
    """From a point to a rectangle."""
    dx = max(card[0] - point[0], 0, point[0] - card[2])
    dy = max(card[1] - point[1], 0, point[1] - card[3])
    return (dx * dx + dy * dy) ** 0.5


@pytest.mark.parametrize("text", [*ODD, "", "one two three " * 20, "é" * 50])
def test_lines_lose_nothing_and_are_as_short_as_they_were_to_be(text: str) -> None:
    lines = wrapped(text, 16)
    assert "".join(lines) == text and all(sum(map(width_of, line)) <= 16 for line in lines)


def test_picture_says_what_each_stage_holds_beside_what_its_device_has(view: PlanView, memory: RunMemory) -> None:
    root = ET.fromstring(svg(view))
    first, second, last = [node for node in root.iter(f"{SVG}g") if node.get("class") == "pv-stage"]
    said = texts_of(first)
    lacks = memory.stages[0].total / 2**20 - 0.6e9 / 2**20
    assert {"mac.lan", "embedding + layers 0-9", f"too much: lacks {lacks:,.1f} MiB"} <= {*said}
    assert "norm, head (tied)" in "".join(texts_of(last)) and "(device: ?)" in "".join(texts_of(second))
    assert root.find(f".//{SVG}g[@id='tied']") is not None
    for group, stage in zip((first, second, last), view.stages, strict=True):
        parts, bars = memory_parts(stage), [group.find(f".//{SVG}rect[@class='pv-m{kind}']") for kind in range(4)]
        assert sum(parts) == memory.stages[stage.index].total
        widths = [float(bar.get("width", 0)) for bar in bars if bar is not None]
        # Rounded to a tenth of a pixel; all of a stage that is short of memory, or whose device is not known.
        assert widths == pytest.approx([part / sum(parts) * 260 for part in parts], abs=0.06)
    link = "".join(texts_of(root))
    load = memory.links[0]
    assert f"{load.forward / 2**20:,.1f} MiB a step" in link and f"{load.backward / 2**20:,.1f} MiB a step" in link


def test_figures_without_activations_are_called_that(run: ResolvedRun, memory: RunMemory) -> None:
    stages = [dataclasses.replace(stage, per_micro_batch=0, layer_work=0, logits=0) for stage in memory.stages]
    text = mermaid(view_of(run, dataclasses.replace(memory, stages=stages, complete=False)))
    assert text.count("memory before activations") == 3


class Page(html.parser.HTMLParser):
    """A page's tags, the text of its cells, and its title."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.cells: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag in ("td", "th"):
            self.cells.append("")

    def handle_data(self, data: str) -> None:
        if self.cells:
            self.cells[-1] += data


@pytest.mark.parametrize("name", ODD)
def test_page_shows_any_name_literally_and_asks_no_network(name: str) -> None:
    text = html_page(view_of(plan(name)))
    page = Page(text)
    assert f"1: {name}" in page.cells
    tags = [tag for tag, _ in page.tags]
    assert "svg" in tags and not {"script", "link", "img", "iframe", "object", "b", "mps"} & {*tags}
    assert not any(
        key in ("src", "href", "xlink:href") or key.startswith("on") for _, found in page.tags for key in found
    )
    assert "url(" not in text and "@import" not in text
    assert re.sub(r'xmlns="http://www\.w3\.org/2000/svg"', "", text).count("://") == name.count("://")


@pytest.fixture(scope="module")
def understood() -> list[dict[str, Any]]:
    """What the real Mermaid makes of a plan with each odd name, and of a text that is none."""
    folder = os.environ.get("HETERO_MERMAID")
    if folder is None or shutil.which("node") is None:
        pytest.skip("HETERO_MERMAID names no folder with `npm install mermaid jsdom`, or there is no node")
    texts = [mermaid(view_of(plan(name, "other", model="smollm2_135m"))) for name in ODD]
    command = ["node", str(Path(__file__).with_name("mermaid_check.mjs")), folder]
    asked = json.dumps([*texts, 'flowchart LR\n s0["a'])
    done = subprocess.run(command, input=asked, capture_output=True, text=True, timeout=120, check=True)
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("index", range(len(ODD)), ids=lambda index: ODD[index][:20])
def test_mermaid_itself_reads_the_names_and_the_links(understood: list[dict[str, Any]], index: int) -> None:
    found = understood[index]
    nodes = {key: re.sub("ﬂ°°(\\d+)¶ß", lambda code: chr(int(code[1])), text) for key, text in found["nodes"]}
    assert list(nodes) == ["s0", "s1", "s2"]
    shown = re.split("<br ?/?>", nodes["s1"])[0].replace(JOINER, "")
    assert shown == f"stage 1: {ODD[index]}"
    assert found["edges"] == [["s0", "s1"], ["s1", "s2"], ["s0", "s2"]]
    assert "\\n" not in nodes["s1"]  # which it would take for a new line


def test_mermaid_itself_refuses_what_is_no_diagram(understood: list[dict[str, Any]]) -> None:
    assert "Parse error" in understood[-1]["error"]


@needs_dot
def test_graphviz_shows_any_name_literally_and_joins_the_right_nodes() -> None:
    names = ODD
    graph = dot(view_of(plan(*names, model="smollm2_135m")))
    done = subprocess.run(["dot", "-Tsvg"], input=graph.encode(), capture_output=True, check=True)
    assert not done.stderr
    root = ET.fromstring(done.stdout)
    nodes = {}
    for group in root.iter(f"{SVG}g"):
        if group.get("class") == "node":
            nodes[group.findtext(f"{SVG}title")] = "".join(texts_of(group)).replace("\u00a0", " ")
    assert nodes.keys() == {f"s{index}" for index in range(len(names) + 1)}
    for index, name in enumerate(names, 1):
        assert nodes[f"s{index}"].replace(" ", "").startswith(f"stage{index}:{name}pc.lan:9999".replace(" ", ""))
    edges = {group.findtext(f"{SVG}title") for group in root.iter(f"{SVG}g") if group.get("class") == "edge"}
    assert edges == {*(f"s{index}->s{index + 1}" for index in range(len(names))), f"s0->s{len(names)}"}


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [(None, None), ("svg", ["svg"]), (["png", "svg", "png"], ["png", "svg"]), ("all", list(FORMATS))],
)
def test_formats_are_one_several_or_all(wanted: object, expected: list[str] | None) -> None:
    assert formats_of(wanted) == expected


@pytest.mark.parametrize("wanted", ["bmp", ["svg", "bmp"], [], 3, "SVG", [["svg"]]])
def test_what_is_no_format_is_refused_with_those_there_are(wanted: object) -> None:
    with pytest.raises(ConfigError, match=r"^format must .*null"):
        formats_of(wanted)


def test_run_is_drawn_beside_its_start(
    run: ResolvedRun, memory: RunMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_program(monkeypatch, tmp_path, "echo picture")
    with drawn_beside(run, tmp_path / "run", memory):
        pass
    made = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    assert sorted(made) == sorted(f"architecture{FORMATS[name]}" for name in OF_A_RUN)
    assert made["architecture.png"] == b"picture\n" and b"embedding + layers 0-9" in made["architecture.svg"]


@pytest.mark.parametrize("fault", ["view", "folder", "renderer"])
def test_fault_in_drawing_is_one_warning_and_the_run_goes_on(
    run: ResolvedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    without_packages(monkeypatch)
    with_program(monkeypatch, tmp_path, "exit 7")
    folder = tmp_path / "run"
    if fault == "view":
        monkeypatch.setattr(diagram, "view_of", lambda *_: 1 / 0)
    if fault == "folder":
        folder.touch()
    with drawn_beside(run, folder, None):
        went_on = True
    assert went_on and [record.levelname for record in caplog.records] == ["WARNING"]
    assert "\n" not in caplog.text.strip()


def test_missing_renderer_at_a_start_is_a_remark_and_no_warning(
    run: ResolvedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    only(monkeypatch, tmp_path, "none")
    caplog.set_level(logging.INFO)
    with drawn_beside(run, tmp_path / "run", None):
        pass
    assert [record.levelname for record in caplog.records] == ["INFO"] and "resvg-py" in caplog.text
    assert len(list((tmp_path / "run").iterdir())) == 3


def test_renderer_that_hangs_does_not_outlive_the_run(
    run: ResolvedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_program(monkeypatch, tmp_path, f"echo $$ > {tmp_path}/pid; exec sleep 600")
    without_packages(monkeypatch)
    monkeypatch.setattr(diagram, "_PATIENCE_S", 1.0)
    began = time.monotonic()
    with drawn_beside(run, tmp_path / "run", None):
        pass
    assert time.monotonic() - began < 30
    pid = int((tmp_path / "pid").read_text(encoding="utf-8"))
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and Path(f"/proc/{pid}").exists():
        time.sleep(0.02)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
