"""PNG and PDF of a picture: by Graphviz's program `dot`, or by the packages resvg-py and pillow."""

from __future__ import annotations

import importlib
import importlib.util
import io
import re
import shutil
import subprocess
import zlib
from collections.abc import Callable
from typing import Any

from hetero.errors import HeteroError
from hetero.folders import one_line

REMEDIES = {
    ".png": "install Graphviz (apt, brew or winget install graphviz), or pip install resvg-py",
    ".pdf": "install Graphviz (apt, brew or winget install graphviz), or pip install resvg-py pillow",
}

_PROGRAM_S = 30.0
_DATE = re.compile(rb"(/CreationDate \(D:)\d{14}")  # replaced by one as long, since a PDF counts its bytes
_DOTS_PER_PIXEL = 2


class RenderError(HeteroError):
    """A picture could not be made: nothing here can, or what could has failed.

    Args:
        text: why, in a line.
        nothing_there: there is no renderer on this machine.
    """

    def __init__(self, text: str, *, nothing_there: bool = False) -> None:
        super().__init__(text)
        self.nothing_there = nothing_there


class Rendering:
    """Makes pictures, until it is told to stop; one at a time."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped = False

    def stop(self) -> None:
        """Ends a program that is at work, for another thread."""
        self._stopped = True
        if self._process is not None:
            self._process.kill()

    def make(self, suffix: str, *, dot: str, svg: str) -> bytes:
        """A picture as .png or .pdf.

        Args:
            suffix: .png or .pdf.
            dot: the picture for Graphviz.
            svg: the picture for everyone else.

        Raises:
            RenderError: it could not be made; says why, and what would help.
        """
        reasons = []
        for is_here, by in self._ways(suffix, dot, svg):
            if not is_here():
                continue
            try:
                return by()
            except Exception as exc:  # foreign code, which may fail in any way: the next one is tried
                reasons.append(f"{type(exc).__name__}: {one_line(exc)}")
            if self._stopped:
                break
        why = "; ".join(reasons) or "none is here"
        remedy = REMEDIES[suffix]
        raise RenderError(f"{suffix[1:]} needs a renderer ({why}): {remedy}", nothing_there=not reasons)

    def _ways(self, suffix: str, dot: str, svg: str) -> list[tuple[Callable[[], bool], Callable[[], bytes]]]:
        packages = ("resvg_py",) if suffix == ".png" else ("resvg_py", "PIL")
        of_svg = _png if suffix == ".png" else _pdf
        return [
            (lambda: shutil.which("dot") is not None, lambda: self._graphviz(suffix, dot)),
            (lambda: all(map(importlib.util.find_spec, packages)), lambda: of_svg(svg)),
        ]

    def _graphviz(self, suffix: str, dot: str) -> bytes:
        """What `dot` makes of it, without the time, so that the same picture has the same bytes."""
        command = ["dot", f"-T{suffix[1:]}", *(["-Gdpi=144"] if suffix == ".png" else [])]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe) as process:
            self._process = process
            if self._stopped:
                process.kill()
            try:
                made, errors = process.communicate(dot.encode(), _PROGRAM_S)
            except BaseException:
                process.kill()
                raise
        if process.returncode or not made:
            raise RenderError(f"dot failed: {errors.decode(errors='replace').strip() or process.returncode}")
        return _DATE.sub(rb"\g<1>19700101000000", made)


def _png(svg: str) -> bytes:
    package: Any = importlib.import_module("resvg_py")
    return bytes(package.svg_to_bytes(svg_string=svg, zoom=_DOTS_PER_PIXEL))


def _pdf(svg: str) -> bytes:
    """A page with the picture in it, of as many dots as paper shows."""
    package: Any = importlib.import_module("PIL.Image")
    with package.open(io.BytesIO(_png(svg))) as loaded:
        white = package.new("RGB", loaded.size, "white")
        white.paste(loaded, mask=loaded.convert("RGBA").getchannel("A"))
    points = tuple(size / _DOTS_PER_PIXEL * 0.75 for size in white.size)
    return pdf_of_image(white.tobytes(), white.size, (points[0], points[1]))


def pdf_of_image(pixels: bytes, size: tuple[int, int], points: tuple[float, float]) -> bytes:
    """A PDF of one page that an image fills (PDF 1.4, ISO 32000-1 section 7.5); the same pixels give the same bytes.

    Args:
        pixels: red, green and blue of each, row by row.
        size: width and height in pixels.
        points: of the page.
    """
    packed = zlib.compress(pixels)
    width, height = (f"{point:.2f}" for point in points)
    content = f"q {width} 0 0 {height} 0 0 cm /Im0 Do Q".encode()
    image = f"/Type /XObject /Subtype /Image /Width {size[0]} /Height {size[1]} /ColorSpace /DeviceRGB"
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 {width} {height}] "
        "/Resources << /XObject << /Im0 4 0 R >> >> /Contents 5 0 R >>".encode(),
        _stream(f"{image} /BitsPerComponent 8 /Filter /FlateDecode", packed),
        _stream("", content),
    ]
    document, offsets = b"%PDF-1.4\n%\xe2\xe3\xcf\xd3\n", []
    for number, body in enumerate(objects, 1):
        offsets.append(len(document))
        document += b"%d 0 obj\n%s\nendobj\n" % (number, body)
    table = "".join(f"{offset:010d} 00000 n \n" for offset in offsets)
    count = len(objects) + 1
    end = f"xref\n0 {count}\n0000000000 65535 f \n{table}trailer\n<< /Size {count} /Root 1 0 R >>\n"
    return document + f"{end}startxref\n{len(document)}\n%%EOF\n".encode()


def _stream(entries: str, data: bytes) -> bytes:
    return f"<< {entries} /Length {len(data)} >>\nstream\n".encode() + data + b"\nendstream"
