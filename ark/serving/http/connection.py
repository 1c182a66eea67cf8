"""One connection of the server. It extends uvicorn's connection by time limits and by errors as
JSON.

A client that sends only a part of a request, or that stops reading an answer, is disconnected after
a time. Used by ark.serving.http.run.
"""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from ark.serving.http.errors import ApiError

HEAD_S = 30.0  # the limit for a request's first line and headers
WRITE_S = 60.0  # the limit for a client that has stopped reading an answer


class Requests(h11.Connection):
    """The parser of a connection. It refuses requests that a proxy before the server may divide
    otherwise (request smuggling): those with two lengths, and chunks in HTTP/1.0.
    """

    def next_event(self) -> Any:
        """The next part of a request; see h11."""
        event = super().next_event()
        if isinstance(event, h11.Request):
            names = {name for name, _ in event.headers}
            chunked = b"transfer-encoding" in names
            if chunked and (b"content-length" in names or event.http_version < b"1.1"):
                raise h11.RemoteProtocolError("the length of the body is ambiguous")
        return event


class Connection(H11Protocol):
    """One connection. asyncio calls its methods on the event loop."""

    _head: asyncio.TimerHandle | None = None
    _write: asyncio.TimerHandle | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.conn = Requests(h11.SERVER)

    def connection_made(self, transport: Any) -> None:
        """Called when a client has connected."""
        super().connection_made(transport)
        self._watch_head()

    def data_received(self, data: bytes) -> None:
        """Called when bytes of a request have arrived."""
        super().data_received(data)
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Called when the connection has ended."""
        super().connection_lost(exc)
        for timer in (self._head, self._write):
            if timer is not None:
                timer.cancel()

    def pause_writing(self) -> None:
        """Called when the client reads more slowly than the server writes."""
        super().pause_writing()
        self._write = self.loop.call_later(WRITE_S, self.transport.abort)

    def resume_writing(self) -> None:
        """Called when the client has caught up."""
        super().resume_writing()
        if self._write is not None:
            self._write.cancel()

    def send_400_response(self, msg: str) -> None:
        """Answers bytes that are not an HTTP request, and closes the connection."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()  # a part of an answer was sent, so no error can follow it
            return
        body = ApiError(400, "the request is not valid HTTP/1.1").body()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        response = h11.Response(status_code=400, headers=headers, reason=b"Bad Request")
        for event in (response, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event))
        self.transport.close()

    def _watch_head(self) -> None:
        """Closes the connection after a time limit in two cases: the client has begun a request and
        does not complete its headers, or it is still sending the body of a request that was already
        answered.
        """
        state = self.conn.their_state
        answered = state is h11.SEND_BODY and self.conn.our_state is h11.DONE
        waiting = (state is h11.IDLE or answered) and not self.transport.is_closing()
        if waiting and self._head is None:
            self._head = self.loop.call_later(HEAD_S, self.transport.close)
        elif not waiting and self._head is not None:
            self._head.cancel()
            self._head = None
