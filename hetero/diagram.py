"""A plan as Mermaid and DOT text, from configuration alone."""

from __future__ import annotations

from pathlib import Path

from hetero.errors import ConfigError, show_address
from hetero.memory import RunMemory, show_bytes
from hetero.resolve import ResolvedRun

FORMATS = (".mmd", ".dot")


def write_diagrams(resolved: ResolvedRun, output: Path, memory: RunMemory | None = None) -> list[Path]:
    """Writes the plan's diagrams.

    Args:
        resolved: the run.
        memory: its figures, to be shown as well.
        output: a file that ends in .mmd or .dot, or a folder that gets both.

    Returns:
        The absolute paths of the files.

    Raises:
        ConfigError: another kind of file, or a place that cannot be written.
    """
    if output.suffix and output.suffix not in FORMATS:
        raise ConfigError(f"output must end in {' or '.join(FORMATS)}, or be a folder, got {str(output)!r}")
    targets = [output] if output.suffix else [output / f"architecture{suffix}" for suffix in FORMATS]
    texts = {".mmd": mermaid(resolved, memory), ".dot": dot(resolved, memory)}
    written = []
    for target in targets:
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(texts[target.suffix], encoding="utf-8")
        except OSError as exc:
            raise ConfigError(f"output must be a place that can be written, got {target} ({exc.strerror})") from None
        written.append(target.absolute())
    return written


def mermaid(resolved: ResolvedRun, memory: RunMemory | None = None) -> str:
    """The plan as a Mermaid flowchart."""
    lines = ["flowchart LR"]
    for index, label in enumerate(_labels(resolved, memory)):
        text = "<br/>".join(_mermaid_text(line) for line in label)
        lines.append(f'    s{index}["{text}"]')
    for index, text in enumerate(_link_labels(resolved, memory)):
        lines.append(f'    s{index} -->|"{_mermaid_text(text)}"| s{index + 1}')
    return "\n".join(lines) + "\n"


def dot(resolved: ResolvedRun, memory: RunMemory | None = None) -> str:
    """The plan as a Graphviz digraph."""
    lines = ["digraph pipeline {", "    rankdir=LR;", "    node [shape=box];"]
    for index, label in enumerate(_labels(resolved, memory)):
        lines.append(f"    s{index} [label={_dot_text(label)}];")
    for index, text in enumerate(_link_labels(resolved, memory)):
        lines.append(f"    s{index} -> s{index + 1} [label={_dot_text([text])}, dir=both];")
    return "\n".join([*lines, "}"]) + "\n"


def _labels(resolved: ResolvedRun, memory: RunMemory | None) -> list[list[str]]:
    """Lines of text for each stage."""
    hardware, labels = resolved.config.hardware, []
    for index, stage in enumerate(resolved.stages):
        worker = resolved.workers[index - 1] if index else None
        host = hardware.coordinator.host if worker is None else show_address(worker.host, worker.port)
        parts = [f"layers {stage.start}-{stage.end - 1}"]
        if index == 0:
            parts.insert(0, "embedding")
        if index == len(resolved.stages) - 1:
            parts.append("norm, head")
        kind = f"{stage.dtype}" + ("" if stage.quantization == "none" else f", {stage.quantization}")
        labels.append([f"stage {index}: {stage.id}", host, f"{stage.device or 'auto'}, {kind}", " + ".join(parts)])
        if memory is not None:
            figures = memory.stages[index]
            labels[-1].append(f"{figures.parameters / 1e6:,.1f} M parameters, {figures.trained / 1e6:,.2f} M trained")
            labels[-1].append(f"{show_bytes(figures.total)} of memory")
    return labels


def _link_labels(resolved: ResolvedRun, memory: RunMemory | None) -> list[str]:
    """A text for each link: bytes per token and direction."""
    spec_dtype = resolved.config.transport.wire_dtype
    labels = []
    for index, stage in enumerate(resolved.stages[:-1]):
        dtype = stage.dtype if spec_dtype == "auto" else spec_dtype
        size = resolved.facts.hidden_size * (4 if dtype == "float32" else 2)
        labels.append(f"{dtype} hidden and grad, {size / 1024:g} KiB/token each way")
        if memory is not None:
            labels[-1] += f", {show_bytes(memory.links[index].forward + memory.links[index].backward)}/step in all"
    return labels


def _mermaid_text(text: str) -> str:
    """Text that Mermaid shows literally: characters that are syntax become entity codes."""
    return "".join(c if c.isalnum() or c in " .,:/-_+()" else f"#{ord(c)};" for c in text)


def _dot_text(lines: list[str]) -> str:
    """A quoted DOT string that shows literally."""
    escaped = (line.replace("\\", "\\\\").replace('"', '\\"') for line in lines)
    return '"' + "\\n".join(escaped) + '"'
