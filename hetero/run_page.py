"""A run's report as one HTML page: figures, curves, plan, pictures, configuration, and how it ended."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hetero import charts
from hetero.charts import Line, bar, line_chart, show
from hetero.curves import RECENT, Curves, StageCurves
from hetero.errors import show_address
from hetero.hiding import without_secrets
from hetero.page import page, text
from hetero.run_files import Status
from hetero.series import Series

REFRESH_S = 3
_FILES = ("run.json", "metrics.jsonl", "eval.jsonl", "samples.jsonl", "trace.json", "architecture.html", "train.log")
_TASKS = {"evaluate": "evaluation alone", "generate": "answers to prompts"}

STYLE = (
    charts.STYLE
    + """
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 400px), 1fr)); gap: 12px; }
.charts .card { margin: 0; padding: 10px; }
.tiles .card { margin: 0; padding: 10px 14px; }
.tiles .card b { display: block; font-size: 20px; line-height: 1.3; font-weight: 600;
  font-variant-numeric: tabular-nums; }
.tile-name { color: var(--faint); font-size: 13px; }
.badge { display: inline-block; padding: 1px 10px; border-radius: 99px; border: 1px solid currentColor;
  font-size: 13px; font-weight: 600; }
.why { border-color: var(--bad); overflow-wrap: anywhere; white-space: pre-wrap; }
.bar { display: block; min-width: 60px; margin-top: 4px; }
details { margin: 12px 0; } summary { cursor: pointer; font-weight: 600; }
.keys td:first-child { color: var(--faint); font-family: ui-monospace, Menlo, Consolas, monospace; font-size: 13px; }
.keys td { padding: 2px 12px 2px 0; }
.nowrap, .wide th { white-space: nowrap; }
.wide td { overflow-wrap: break-word; }
.keys td, .ids { overflow-wrap: anywhere; }
"""
)

_COLOUR = {"running": "", "finished": "good", "stopped": "warn", "interrupted": "warn", "failed": "bad"}


def run_page(
    folder: Path,
    about: dict[str, Any],
    status: Status,
    curves: Curves,
    *,
    timeline_svg: str | None = None,
    live: bool = False,
) -> str:
    """The page.

    Args:
        folder: of the run.
        about: what run.json holds.
        status: how far the run is.
        curves: its steps.
        timeline_svg: picture of one step.
        live: the page is read again every few seconds.
    """
    title = about.get("run_name") or f"run {folder.name}"
    parts = [
        f"<style>{STYLE}</style>",
        _head(folder, about, status, curves),
        _tiles(status, curves, live),
        *(["<h2>Curves</h2>", _charts(about, status, curves)] if _task(about) == "train" else []),
        "<h2>Stages</h2>",
        _stages(about, status, curves),
    ]
    if timeline_svg is not None:
        parts += ["<h2>One step</h2>", f'<figure class="card">{timeline_svg}</figure>']
    if (picture := _svg_file(folder / "architecture.svg")) is not None:
        parts += ["<h2>Architecture</h2>", f'<figure class="card">{picture}</figure>']
    parts.append(_settings(folder, about))
    return page(title, "\n".join(parts), refresh_s=REFRESH_S if live else None)


def flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and their plain values; what may be a secret is not told."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from flat(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for index, item in enumerate(value):
            yield from flat(item, f"{name}[{index}]")
    else:
        yield name, without_secrets(value, name)


def duration(seconds: float) -> str:
    """A time as people say it."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1000:.0f} ms"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def _head(folder: Path, about: dict[str, Any], status: Status, curves: Curves) -> str:
    """How it goes or went, why, and where things are."""
    last = int(curves.last["step"]) if curves.last else 0
    badge = f'<span class="badge {_COLOUR.get(status.state, "faint")}">{text(status.state)}</span>'
    model = about.get("spec", {}).get("model", {}).get("path", "")
    task = _task(about)
    what = f"step {last:,} of {status.total_steps:,}" if task == "train" else text(_TASKS.get(task, task))
    lines = [f"<p>{badge} {what} · model {text(model)}</p>"]
    if status.state == "failed":
        lines.append(
            f'<p class="card why"><b class="bad">Failed:</b> {text(status.reason or "no reason was given")}</p>'
        )
    elif status.state in ("stopped", "interrupted"):
        why = f" ({text(status.reason)})" if status.reason else ""
        remedy = ", with a checkpoint; the same command with checkpoint.resume=latest goes on"
        ended = f"Ended before its last step{why}{remedy if status.state == 'stopped' else ''}."
        lines.append(f"<p>{ended if task == 'train' else f'Ended before it was done{why}.'}</p>")
    elif status.state == "unknown":
        lines.append('<p class="warn">No end was recorded.</p>')
    if resumed := about.get("resumed"):
        lines.append(f"<p>Went on after step {resumed['step']:,} of {text(resumed['checkpoints'])}.</p>")
    for reached, back in status.rewinds:
        lines.append(f'<p class="warn">Went back from step {reached:,} to step {back:,} after a fault.</p>')
    adapter = folder.absolute() / "adapter"
    if status.state != "running" and adapter.is_dir():
        lines.append(f"<p>Adapter: <code>{text(adapter)}</code></p>")
    return "\n".join(lines)


def _task(about: dict[str, Any]) -> str:
    return str(about.get("config", {}).get("task", "train"))


def _tiles(status: Status, curves: Curves, live: bool) -> str:
    found = []
    if curves.last is not None:
        found.append(("loss", show(curves.last["loss"])))
        assert curves.recent_loss is not None
        found.append((f"loss, mean of last {min(RECENT, curves.steps)} steps", show(curves.recent_loss)))
    if curves.evaluations:
        found.append(("evaluation loss", show(curves.evaluations[-1]["eval_loss"])))
        if (perplexity := curves.evaluations[-1].get("perplexity")) is not None:
            found.append(("perplexity", show(perplexity)))
        if curves.last is None and (tokens := curves.evaluations[-1].get("tokens")) is not None:
            found.append(("label tokens", f"{tokens:,}"))
    if curves.last is not None:
        assert curves.step_time_s is not None
        found.append(("tokens per second", show(curves.tokens_per_s or 0.0)))
        found.append(("step time, median", duration(curves.step_time_s)))
        left = status.total_steps - int(curves.last["step"])
        if live and left > 0:
            found.append(("time left", duration(left * curves.step_time_s)))
    found.append(("time since start" if live else "time", duration(status.seconds or curves.elapsed_s)))
    cells = [f'<div class="card"><span class="tile-name">{text(n)}</span><b>{text(v)}</b></div>' for n, v in found]
    return f'<div class="tiles">{"".join(cells)}</div>'


def _charts(about: dict[str, Any], status: Status, curves: Curves) -> str:
    marks = [(back + 1.0, f"went back to step {back} after a fault") for _, back in status.rewinds]
    if resumed := about.get("resumed"):
        marks.append((resumed["step"] + 1.0, f"resumed after step {resumed['step']}"))
    of, loss = curves.of_step, [Line("training", curves.of_step["loss"])]
    if curves.evaluations:
        points = [(int(record["step"]), float(record["eval_loss"])) for record in curves.evaluations]
        loss.append(Line("evaluation", Series(points), 1, dots=True))
    clip = about.get("spec", {}).get("loop", {}).get("max_grad_norm")
    limit = (float(clip), f"clipped above {show(float(clip))} (loop.max_grad_norm)") if clip else None
    found = [
        line_chart("loss", loss, log=None, marks=marks),
        line_chart("learning rate", [Line("learning rate", of["lr"])], marks=marks),
        line_chart("gradient norm", [Line("norm", of["grad_norm"], 2)], log=None, marks=marks, limit=limit),
        line_chart("tokens per second", [Line("tokens per second", of["tokens_per_s"], 3)], marks=marks),
    ]
    if of["router_loss"].buckets:
        found.append(line_chart("router loss", [Line("router loss", of["router_loss"], 4)], marks=marks))
    named = [(f"{index} {name}", stage) for (index, name), stage in curves.stages.items()]
    busy = [Line(name, stage.busy, colour) for colour, (name, stage) in enumerate(named)]
    wait = [Line(name, stage.wait, colour) for colour, (name, stage) in enumerate(named)]
    found.append(line_chart("computing, share of each step", busy, percent=True, marks=marks))
    found.append(line_chart("waiting, share of each step", wait, percent=True, marks=marks))
    return '<div class="charts">' + "".join(f'<div class="card">{chart}</div>' for chart in found) + "</div>"


def _stages(about: dict[str, Any], status: Status, curves: Curves) -> str:
    """The plan, a row a stage, with what each did and holds."""
    spec = about.get("spec", {})
    stages, workers = status.stages or spec.get("stages", []), spec.get("workers", [])
    addresses = {str(worker["id"]): show_address(worker["host"], worker["port"]) for worker in workers}
    head = ("stage", "layers", "device", "computing", "waiting", "sends a step", "peak memory")
    rows = []
    for index, stage in enumerate(stages):
        name = str(stage["id"])
        where = addresses.get(name, "") if index else "coordinator"
        device, dtype = status.devices[index] if index < len(status.devices) else (stage.get("device") or "auto", "")
        kind = [
            device,
            dtype or stage.get("dtype") or "",
            q if (q := stage.get("quantization") or "none") != "none" else "",
        ]
        found = curves.stages.get((index, name), StageCurves())
        limit = status.memory_bytes[index] if index < len(status.memory_bytes) else None
        rows.append(
            f'<tr><td>{index} <b>{text(name)}</b><br><span class="faint">{text(where)}</span></td>'
            f'<td class="nowrap">{stage["start"]}–{stage["end"] - 1}</td>'
            f"<td>{text(' '.join(part for part in kind if part))}</td>"
            f"<td>{_share(found, found.busy_share, index)}</td><td>{_share(found, found.wait_share, index)}</td>"
            f'<td class="nowrap">{_bytes(found.bytes_sent / found.steps) if found.steps else "–"}</td>'
            f"<td>{_memory(found.memory_bytes, limit, index)}</td></tr>"
        )
    cells = "".join(f"<th>{name}</th>" for name in head)
    note = "Shares of the time of all steps; the rest is data, norms and the optimizer."
    return f'<div class="wide"><table><tr>{cells}</tr>{"".join(rows)}</table></div><p class="faint">{note}</p>'


def _share(stage: StageCurves, share: float, colour: int) -> str:
    return "–" if not stage.steps else f"{share:.0%}{bar(share, colour=colour, title=f'{share:.1%}')}"


def _memory(held: int, limit: int | None, colour: int) -> str:
    if not held:
        return "–"
    if not limit:
        return _bytes(held)
    return f"{_bytes(held)} of {_bytes(limit)}{bar(held / limit, colour=colour, title=f'{held / limit:.1%}')}"


def _bytes(count: float) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:,.3g} {unit}" if count < 1000 * size else f"{count / size:,.0f} {unit}"
    return f"{count:.0f} B"


def _svg_file(file: Path) -> str | None:
    """A picture in the run's folder, from its `<svg` on."""
    try:
        content = file.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return None
    return content[content.index("<svg") :] if "<svg" in content else None


def _settings(folder: Path, about: dict[str, Any]) -> str:
    """The configuration, the versions, and the files beside the page."""
    parts = ["<h2>Settings</h2>", _table("configuration", list(flat(about.get("config", {}))))]
    parts.append(_table("versions", list(about.get("versions", {}).items())))
    if links := [f'<a href="{name}">{name}</a>' for name in _FILES if (folder / name).is_file()]:
        parts.append(f"<p>Files: {', '.join(links)}</p>")
    parts.append(
        f'<p class="faint ids">run {text(about.get("run_id", ""))}, digest {text(about.get("digest", ""))}</p>'
    )
    return "\n".join(parts)


def _table(name: str, pairs: Sequence[tuple[str, Any]]) -> str:
    rows = "".join(f"<tr><td>{text(key)}</td><td>{text(_plain(value))}</td></tr>" for key, value in pairs)
    return (
        f'<details><summary>{text(name)}</summary><div class="wide"><table class="keys">{rows}</table></div></details>'
    )


def _plain(value: Any) -> str:
    """A value as YAML would have it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return "[" + ", ".join(_plain(item) for item in value) + "]" if isinstance(value, list) else str(value)
