"""Chats to text, by the chat template of a tokenizer, in a process that limits what a template may take."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

from dcdm.config import DataError
from dcdm.data.tokenizers import Tokenizer

SECONDS = 5
"""How long one chat may take."""
MEMORY = 512 << 20
"""Bytes of address space of the process that renders."""
CHARACTERS = 4 << 20
"""How much text one chat may give."""
START_SECONDS = 60
RENDERER = Path(__file__).with_name("chat_renderer.py")
KEPT = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "TZ", "LANG")
"""What the process sees of the environment: no keys."""


class ChatError(Exception):
    """The chat template refuses a chat, or takes too much; the message says which."""


class ChatBusy(ChatError):
    """Nothing is wrong with the chat: its turn did not come in time."""


class ChatTemplate:
    """The chat template of a tokenizer that has one. Its text is encoded with `templated=True`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._settings = {
            "template": tokenizer.chat_template,
            "names": {  # every window begins with BOS anyway
                "bos_token": "", "eos_token": tokenizer.eos_token, "tools": None, "documents": None
            },
            "seconds": SECONDS, "memory": MEMORY, "characters": CHARACTERS,
        }  # fmt: skip
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def render(self, messages: list[dict[str, str]], *, answering: bool) -> str:
        """The chat as text; `answering` ends it where an answer begins."""
        request = {"messages": messages, "add_generation_prompt": answering}
        if not self._lock.acquire(timeout=SECONDS):
            raise ChatBusy(f"the chat template is busy with other chats for {SECONDS} seconds; try again")
        try:
            answer = self._ask(self._running(), request, SECONDS)
            if answer is None or answer.get("over"):
                self._end()
        finally:
            self._lock.release()
        if answer is None:
            raise ChatError(f"the chat template took longer than {SECONDS} seconds, or its process died")
        if "error" in answer:
            raise ChatError(f"the chat template {answer['error']}")
        return str(answer["text"])

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._end()
        process = subprocess.Popen(
            [sys.executable, "-P", "-B", str(RENDERER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, env={name: os.environ[name] for name in KEPT if name in os.environ},
        )  # fmt: skip
        self._process, self._finalizer = process, weakref.finalize(self, _stop, process)
        if self._ask(process, self._settings, START_SECONDS) is None:
            self._end()
            raise DataError(f"the process that renders chat templates does not start: run {RENDERER} to see why")
        return process

    def _ask(self, process: subprocess.Popen[bytes], request: dict[str, Any], seconds: float) -> Any:
        """The answer of the process, or None if it gives none in time; it is ended then."""
        assert process.stdin is not None
        assert process.stdout is not None
        watchdog = threading.Timer(seconds, process.kill)
        watchdog.daemon = True
        watchdog.start()
        try:
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except OSError:
            return None
        finally:
            watchdog.cancel()
        return json.loads(line) if line.endswith(b"\n") else None

    def _end(self) -> None:
        if self._process is not None:
            self._finalizer()
            self._process = None


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):  # what was written last is not wanted any more
                pipe.close()
