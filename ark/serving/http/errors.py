"""The error that every route raises, in the form that OpenAI's clients read: an HTTP status and one
JSON object.
"""

from __future__ import annotations

from typing import Any

import msgspec

INVALID_REQUEST = "invalid_request_error"
SERVER_ERROR = "server_error"
CONTEXT_LENGTH = "context_length_exceeded"
UNSUPPORTED = "unsupported_parameter"


class ApiError(Exception):
    """An error that is sent to the client: an HTTP status and one sentence that explains it.

    kind: the JSON object's `type`. param: the request's field that is wrong. code: a fixed word for
    programs. retry_after: seconds after which the client may try again.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = INVALID_REQUEST,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.retry_after = retry_after

    def content(self) -> dict[str, Any]:
        """The JSON object."""
        error = {
            "message": self.message,
            "type": self.kind,
            "param": self.param,
            "code": self.code,
        }
        return {"error": error}

    def body(self) -> bytes:
        """The JSON object as text."""
        return msgspec.json.encode(self.content())

    def headers(self) -> dict[str, str]:
        """Headers of the response other than its length."""
        headers = {"content-type": "application/json"}
        if self.retry_after is not None:
            headers["retry-after"] = str(self.retry_after)
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return headers


def unsupported(param: str, message: str) -> ApiError:
    """The error for a field that this server does not support."""
    return ApiError(400, message, param=param, code=UNSUPPORTED)
