"""A hub of models on this machine: the routes that huggingface_hub asks, with what it served written down."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlparse

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """What the hub has, how it is to behave, and what it gave away.

    Attributes:
        models: hub id -> folder.
        gated: hub ids whose terms nobody has accepted.
        break_after: bytes of the next weight files after which the connection is cut, one entry for each time.
        served: (file, first byte asked for) -> bytes that were sent, of weight files.
        asked: file -> number of GET requests.
        url: of the hub.
    """

    def __init__(self, models: dict[str, Path]) -> None:
        self.models, self.url = models, ""
        self.gated: set[str] = set()
        self.break_after: list[int] = []
        self.served: Counter[tuple[str, int]] = Counter()
        self.asked: Counter[str] = Counter()

    def bytes_of(self, name: str) -> int:
        """Bytes sent of a file."""
        return sum(count for (file, _), count in self.served.items() if file == name)

    def weights_served(self) -> set[str]:
        """Weight files of which something was sent."""
        return {file for file, _ in self.served if file.endswith(".safetensors")}

    def environment(self, home: Path) -> dict[str, str]:
        """For a process that is to use this hub, with a cache of its own."""
        return {"HF_ENDPOINT": self.url, "HF_HUB_OFFLINE": "0", "HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1"}


@contextmanager
def hub_of(models: dict[str, Path]) -> Iterator[Hub]:
    """Lends a hub that listens on the loopback address."""
    hub = Hub(models)
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing."""

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        parts = unquote(urlparse(self.path).path).strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            self._about("/".join(parts[2:4]), is_tree="tree" in parts)
            return
        model, name = "/".join(parts[:2]), "/".join(parts[4:])
        if model not in self.hub.models or parts[2] != "resolve":
            self._refuse(404, "RepoNotFound")
        elif model in self.hub.gated:
            self._refuse(401, "GatedRepo")
        elif parts[3] not in ("main", COMMIT):
            self._refuse(404, "RevisionNotFound")
        elif not (self.hub.models[model] / name).is_file():
            self._refuse(404, "EntryNotFound")
        else:
            self._send(name, (self.hub.models[model] / name).read_bytes(), body=body)

    def _about(self, model: str, *, is_tree: bool) -> None:
        folder = self.hub.models.get(model)
        if folder is None:
            self._refuse(404, "RepoNotFound")
            return
        names = sorted(file.name for file in folder.iterdir())
        tree = [{"type": "file", "path": name, "size": 1, "oid": name} for name in names]
        about = {"id": model, "sha": COMMIT, "siblings": [{"rfilename": name} for name in names], "tags": []}
        raw = json.dumps(tree if is_tree else about).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def _refuse(self, code: int, what: str) -> None:
        self.send_response(code)
        self.send_header("X-Error-Code", what)
        self.send_header("X-Error-Message", what)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _send(self, name: str, content: bytes, *, body: bool) -> None:
        first, wanted = 0, self.headers.get("Range")
        if wanted:
            first = int(wanted.removeprefix("bytes=").partition("-")[0])
        is_weights = name.endswith(".safetensors")
        digest = hashlib.sha256(content) if is_weights else hashlib.sha1(content)
        self.send_response(206 if wanted else 200)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{digest.hexdigest()}"')
        self.send_header("X-Linked-Etag", f'"{digest.hexdigest()}"')
        self.send_header("X-Linked-Size", str(len(content)))
        self.send_header("Accept-Ranges", "bytes")
        if wanted:
            self.send_header("Content-Range", f"bytes {first}-{len(content) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(content) - first))
        self.end_headers()
        if not body:
            return
        self.hub.asked[name] += 1
        rest = content[first:]
        cut = self.hub.break_after.pop(0) if is_weights and self.hub.break_after else None
        sent = rest if cut is None else rest[:cut]
        self.wfile.write(sent)
        self.wfile.flush()
        if is_weights:
            self.hub.served[name, first] += len(sent)
        if cut is not None:
            self.close_connection = True
            self.connection.shutdown(2)
