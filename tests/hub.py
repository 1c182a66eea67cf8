"""A stand-in for the Hugging Face hub: the HTTP routes that huggingface_hub calls."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextlib.contextmanager
def hub(name: str, directory: Path, asked: list[str]) -> Iterator[str]:
    """Serves a directory as the repository `name` and yields the address. asked: receives the
    requested paths in order.
    """
    files = {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer(False)

        def do_GET(self) -> None:
            self._answer(True)

        def _answer(self, body: bool) -> None:
            path = self.path.partition("?")[0]
            asked.append(path)
            if path.startswith(f"/api/models/{name}/revision/") or path == f"/api/models/{name}":
                siblings = [{"rfilename": file} for file in files]
                about = {"id": name, "modelId": name, "sha": COMMIT, "siblings": siblings}
                self._send(200, json.dumps(about).encode(), body, "application/json")
            elif path.startswith(f"/api/models/{name}/tree/"):
                tree = [
                    {"type": "file", "path": file, "size": len(data), "oid": _oid(data)}
                    for file, data in files.items()
                ]
                self._send(200, json.dumps(tree).encode(), body, "application/json")
            elif path.rpartition("/")[2] in files and path.startswith(f"/{name}/resolve/"):
                self._send(200, files[path.rpartition("/")[2]], body, "application/octet-stream")
            else:
                self._send(404, b"", body, "text/plain")

        def _send(self, status: int, data: bytes, body: bool, kind: str) -> None:
            self.send_response(status)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(data)))
            self.send_header("x-repo-commit", COMMIT)
            self.send_header("etag", f'"{_oid(data)}"')
            if status == 404:
                self.send_header("x-error-code", "RepoNotFound")
            self.end_headers()
            if body:
                self.wfile.write(data)

        def log_message(self, *words: object) -> None:
            """Prints nothing."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _oid(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()
