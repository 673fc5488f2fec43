"""SIGINT and SIGTERM in hands of one's own, for a while."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def stops_handled_by(handler: Callable[[int, Any], None]) -> Iterator[None]:
    """Call `handler` on SIGINT and SIGTERM; whatever handled them before does so again afterwards."""
    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, own in before.items():
            signal.signal(number, own)
