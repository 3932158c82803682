"""The doctor's findings for people and for programs."""

from __future__ import annotations

import dataclasses
import json

from rich.console import Console
from rich.table import Table

from hetero.doctor_checks import Diagnosis

_STYLES = {"ok": "green", "note": "yellow", "fail": "bold red", "not run": "dim"}


def show(diagnosis: Diagnosis, console: Console) -> None:
    """Prints a row for each finding, with the remedy where one is needed."""
    table = Table(title="doctor", title_justify="left", show_lines=False)
    for column in ("machine", "check", "state", "found and what to do"):
        table.add_column(column, overflow="fold")
    for finding in diagnosis.findings:
        cell = Table.grid()
        cell.add_row(_plain(finding.found))
        if finding.remedy:
            cell.add_row(_plain(f"-> {finding.remedy}"))
        state = f"[{_STYLES[finding.state]}]{finding.state}[/]"
        table.add_row(_plain(finding.machine), finding.check, state, cell)
    console.print(table)
    failed = sum(finding.state == "fail" for finding in diagnosis.findings)
    left_out = sum(finding.state == "not run" for finding in diagnosis.findings)
    said = "nothing is wrong" if not failed else f"{failed} of {len(diagnosis.findings)} checks failed"
    console.print(said + (f"; not run: {left_out}" if left_out else ""))


def as_json(diagnosis: Diagnosis) -> str:
    """The same as JSON."""
    found = {
        "well": diagnosis.is_well,
        "findings": [dataclasses.asdict(finding) for finding in diagnosis.findings],
        "lines": [dataclasses.asdict(line) for line in diagnosis.lines],
    }
    return json.dumps(found, indent=1, ensure_ascii=False)


def _plain(text: str) -> str:
    """Text in which brackets are no markup."""
    return text.replace("[", r"\[")
