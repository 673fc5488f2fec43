"""Logs as one JSON object per line. What callers wrote is in them only if the operator asks for it."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any, TextIO

logger = logging.getLogger("dcdm.serving")


class Lines(logging.Formatter):
    """A record as JSON; `extra={"data": {…}}` adds fields."""

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{moment}.{int(record.msecs):03d}Z", "level": record.levelname.lower(),
            "event": record.getMessage(), **getattr(record, "data", {}),
        }  # fmt: skip
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


def start(stream: TextIO | None = None) -> None:
    """Everything of the server's and uvicorn's loggers, one line each."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(Lines())
    for name, level in (("dcdm.serving", logging.INFO), ("uvicorn", logging.WARNING)):
        owner = logging.getLogger(name)
        owner.handlers, owner.propagate = [handler], False
        owner.setLevel(level)


def event(name: str, **data: Any) -> None:
    logger.info(name, extra={"data": data})
