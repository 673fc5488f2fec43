"""Refusals in the form that OpenAI's clients read."""

from __future__ import annotations

import re
from typing import Any

from dcdm.config import ConfigError


class Refusal(Exception):
    """An answer that is no success: status, and what the error object holds."""

    def __init__(
        self, status: int, message: str, *, code: str | None = None, param: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.status, self.code, self.param, self.headers = status, code, param, headers or {}

    def body(self) -> dict[str, Any]:
        return {
            "error": {
                "message": str(self), "type": _type(self.status), "param": self.param, "code": self.code
            }
        }  # fmt: skip


def _type(status: int) -> str:
    named = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
    return named.get(status, "invalid_request_error" if status < 500 else "server_error")


def bad(message: str, param: str | None = None, code: str = "invalid_value") -> Refusal:
    return Refusal(400, message, code=code, param=param)


def of_config(error: ConfigError) -> Refusal:
    """A refused setting; the package's messages begin with its name."""
    named = re.match(r"([a-z_]+)[=:]", str(error))
    return bad(str(error), named[1] if named else None)


def queue_full() -> Refusal:
    return Refusal(
        429, "too many requests are waiting; try again later", code="queue_full", headers={"Retry-After": "1"}
    )


def closing() -> Refusal:
    return Refusal(503, "the server is shutting down", code="shutting_down", headers={"Retry-After": "5"})


def too_long(seconds: float) -> Refusal:
    """Asking for the same again would take as long: clients are told not to."""
    return Refusal(
        408, f"the request took longer than {seconds:g} seconds; ask for fewer tokens, or again when less is asked",
        code="timeout", headers={"x-should-retry": "false"},
    )  # fmt: skip


def too_many_forwards(most: int) -> Refusal:
    return bad(
        f"the text needs more than {most} forwards; ask for fewer tokens, or for a commit that fills more at once",
        "commit", "too_many_forwards",
    )  # fmt: skip
