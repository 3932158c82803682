"""A web page in one file: its own style for light and dark, and no request to any network."""

from __future__ import annotations

import html

# Inline styles and data: images alone, so that not even a name with a tag in it could load or run anything.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"

_STYLE = """
:root { color-scheme: light dark; --back: #ffffff; --card: #f6f8fb; --line: #d3dbe6; --text: #1b2430; --faint: #5b6878;
  --accent: #3566a8; --good: #1f7a4a; --warn: #9a6200; --bad: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --back: #12171f; --card: #1b222d; --line: #364252; --text: #e6ebf2;
  --faint: #9aa8ba; --accent: #7fb0f0; --good: #66c592; --warn: #e0ac4f; --bad: #ff8a80; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 24px 20px 48px; max-width: 1120px; background: var(--back); color: var(--text);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
h1 { font-size: 24px; line-height: 1.25; margin: 0 0 12px; overflow-wrap: anywhere; }
h2 { font-size: 18px; margin: 32px 0 8px; }
p { margin: 8px 0; max-width: 80ch; }
a { color: var(--accent); }
figure { margin: 16px 0; overflow-x: auto; }
svg { max-width: 100%; height: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
.wide { overflow-x: auto; }
th, td { text-align: left; vertical-align: top; padding: 6px 0 6px 14px; border-bottom: 1px solid var(--line);
  font-size: 14px; }
th:first-child, td:first-child { padding-left: 0; }
th { color: var(--faint); font-weight: 600; vertical-align: bottom; }
td { overflow-wrap: anywhere; min-width: 7em; }
.num { text-align: right; min-width: 0; }
td.num { overflow-wrap: normal; white-space: nowrap; }
.faint { color: var(--faint); } .good { color: var(--good); } .warn { color: var(--warn); } .bad { color: var(--bad); }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 14px 16px;
  margin: 12px 0; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px; }
pre { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 12px; overflow-x: auto; }
code, pre { font: 13px/1.45 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
"""


def page(title: str, body: str, *, refresh_s: int | None = None) -> str:
    """A complete page.

    Its classes: `num`, `faint`, `good`, `warn`, `bad`, `card`, `tiles` (cards side by side), `wide` (around a table
    that may be wider than the screen). Its policy lets no script run and nothing be fetched.

    Args:
        title: plain text, for the tab and as heading.
        body: HTML below the heading; whatever it holds of others has gone through `text`.
        refresh_s: the browser reads the file again after so many seconds; None: never.
    """
    refresh = "" if refresh_s is None else f'<meta http-equiv="refresh" content="{int(refresh_s)}">\n'
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"{refresh}<title>{text(title)}</title>\n<style>{_STYLE}</style>\n</head>\n"
        f"<body>\n<h1>{text(title)}</h1>\n{body}\n</body>\n</html>\n"
    )


def text(value: object) -> str:
    """A value as it shows literally in HTML and SVG, between tags and in attributes."""
    return html.escape(drawable(str(value)), quote=True)


def drawable(name: str) -> str:
    """A name with escapes for what cannot be drawn, is forbidden in XML, or would turn the text around it."""
    return "".join(repr(letter)[1:-1] if _cannot_be_drawn(letter) else letter for letter in name)


def _cannot_be_drawn(letter: str) -> bool:
    code = ord(letter)
    controls = code < 0x20 or 0x7F <= code < 0xA0
    return controls or code in (0x2028, 0x2029, 0xFFFE, 0xFFFF) or 0x202A <= code <= 0x202E or 0x2066 <= code <= 0x2069
