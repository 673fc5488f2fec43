"""The process in which a chat template is rendered: a program of its own, with little memory.

A template is a program that comes with a tokenizer, perhaps a stranger's. Jinja's sandbox keeps it from Python's
insides; what it takes of time and memory only the operating system can limit. `dcdm.data.chats` starts this file
and talks to it in lines of JSON: first the template and its settings, then a chat after the other.
"""

from __future__ import annotations

import json
import resource
import signal
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


def main() -> None:
    settings = json.loads(sys.stdin.buffer.readline())
    jinja, template = environment(), None
    limit_process(settings["memory"])
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_REAL, settings["seconds"])  # its signal ends this process
        try:
            template = template or jinja.from_string(settings["template"])
            names = settings["names"] | json.loads(line)
            answer: dict[str, Any] = {"text": rendered(template, names, settings["characters"])}
            answer["text"].encode()  # before anybody's tokenizer does
        except UnicodeEncodeError:
            answer = {"error": "writes half a surrogate pair, which no encoding can hold"}
        except TooMuch as error:
            answer = {"error": str(error), "over": True}
        except MemoryError:
            answer = {"error": f"needs more than {settings['memory'] >> 20} MiB of memory", "over": True}
        except RecursionError:
            answer = {"error": "is nested too deeply", "over": True}
        except Exception as error:  # templates raise what they like about roles they do not know
            answer = {"error": f"refuses it: {str(error).partition(chr(10))[0]}"}
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
