"""The process in which a chat template is rendered: a program of its own, with little memory.

A template is a program that comes with a tokenizer, perhaps a stranger's. Jinja's sandbox keeps it from Python's
insides; what it takes of time and memory only the operating system can limit. `dcdm.data.chats` starts this file
and talks to it in lines of JSON: first the template and its settings, then a chat after the other.
"""

from __future__ import annotations

import json
import resource
import sys
from contextlib import suppress
from datetime import datetime
from typing import Any, ClassVar

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class TooMuch(Exception):
    """The template exceeds a limit; the process is of no use afterwards."""


def environment() -> ImmutableSandboxedEnvironment:
    """What templates of the hub expect to find, as `transformers` offers it."""
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, "jinja2.ext.loopcontrols"]
    )
    made.filters["tojson"] = to_json
    made.globals |= {
        "raise_exception": refuse,
        "strftime_now": lambda form: datetime.now().strftime(form),
        "dict": lambda *args, **more: dict(*args, **more),
    }
    return made


class GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}` marks what the assistant writes; here it is kept unchanged."""

    tags: ClassVar[set[str]] = {"generation"}  # type: ignore[misc]

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Jinja's own filter would spell HTML's signs otherwise."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def refuse(message: str) -> None:
    raise TemplateError(message)


def rendered(template: Any, names: dict[str, Any], most: int) -> str:
    pieces, length = [], 0
    for piece in template.generate(**names):
        pieces.append(piece)
        length += len(piece)
        if length > most:
            raise TooMuch(f"writes more than {most:,} characters")
    return "".join(pieces)


def limit_process(memory: int) -> None:
    for kind, most in ((resource.RLIMIT_AS, memory), (resource.RLIMIT_CORE, 0), (resource.RLIMIT_FSIZE, 0)):
        with suppress(ValueError, OSError):  # a system may not know it, or allow less already
            resource.setrlimit(kind, (most, most))


def limit_next(seconds: int) -> None:
    """End this process even if nobody is there any more to do so."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    with suppress(ValueError, OSError):
        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime) + seconds + 2, hard))


class Renderer:
    """One template, compiled when the first chat comes: by then the limits hold."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings, self.environment = settings, environment()
        self._compiled: Any = None

    def answer(self, line: bytes) -> dict[str, Any]:
        try:
            if self._compiled is None:
                self._compiled = self.environment.from_string(self.settings["template"])
            names = self.settings["names"] | json.loads(line)
            return {"text": rendered(self._compiled, names, self.settings["characters"])}
        except TooMuch as error:
            return {"error": str(error), "over": True}
        except MemoryError:
            return {"error": f"needs more than {self.settings['memory'] >> 20} MiB of memory", "over": True}
        except RecursionError:
            return {"error": "is nested too deeply", "over": True}
        except Exception as error:  # templates raise what they like about roles they do not know
            return {"error": f"refuses it: {str(error).partition(chr(10))[0]}"}


def main() -> None:
    settings = json.loads(sys.stdin.buffer.readline())
    renderer = Renderer(settings)
    limit_process(settings["memory"])
    print("{}", flush=True)  # ready
    for line in sys.stdin.buffer:
        limit_next(settings["seconds"])
        print(json.dumps(renderer.answer(line)), flush=True)


if __name__ == "__main__":
    main()
