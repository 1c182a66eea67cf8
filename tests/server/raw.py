"""A client without a library, which sends arbitrary bytes on a socket."""

from __future__ import annotations

import json
import socket
from types import TracebackType
from typing import Any

PATIENCE_S = 20.0


def request(body: bytes, path: str = "/v1/completions", **headers: str) -> bytes:
    """Returns the bytes of a POST."""
    fields = {
        "host": "ark",
        "content-type": "application/json",
        "content-length": str(len(body)),
        **{name.replace("_", "-"): value for name, value in headers.items()},
    }
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + body


class Raw:
    """A connection to a server. As a context manager it is closed at the end."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)
        self._rest = b""

    def send(self, data: bytes) -> None:
        """Sends bytes."""
        self.socket.sendall(data)

    def line(self) -> bytes:
        """Returns the next line, or the bytes received before the connection ended."""
        while b"\n" not in self._rest:
            data = self.socket.recv(1 << 16)
            if not data:
                line, self._rest = self._rest, b""
                return line
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        return line + b"\n"

    def response(self) -> tuple[int, Any]:
        """Returns the status and the JSON of the next response with a content length."""
        status = int(self.line().split()[1])
        length = 0
        while line := self.line().strip():
            name, _, value = line.partition(b":")
            length = int(value) if name.lower() == b"content-length" else length
        while len(self._rest) < length:
            data = self.socket.recv(1 << 16)
            assert data, "the response ends early"
            self._rest += data
        body, self._rest = self._rest[:length], self._rest[length:]
        return status, json.loads(body)

    def ended(self) -> bool:
        """Waits until the server closes the connection. Returns True if it does."""
        try:
            while self.socket.recv(1 << 16):
                pass
        except ConnectionResetError:
            pass
        except TimeoutError:
            return False
        return True

    def __enter__(self) -> Raw:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        self.socket.close()
