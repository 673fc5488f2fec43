"""The process in which an expression becomes an automaton: a program of its own, with little memory and time.

A short expression can need an automaton of any size, so whoever takes them from strangers must be able to give up.
`dcdm.decoding.constraints` starts this file, writes a line of JSON (`regex` or `schema`, and limits) and reads a
line of JSON, followed by the transitions: int32, a row of 256 for each state, −1 where nothing follows.
"""

from __future__ import annotations

import json
import resource
import sys
from array import array
from typing import Any


def compiled(request: dict[str, Any]) -> bytes:
    """The answer to a request."""
    from outlines_core import Index, Vocabulary
    from outlines_core.json_schema import build_regex_from_schema

    try:
        regex = request["regex"] if "regex" in request else build_regex_from_schema(json.dumps(request["schema"]))
        single = Vocabulary(256, {bytes([byte]): [byte] for byte in range(256)})
        Index(regex, single)  # what is wrong is wrong without what we put around it, too
        # An index leaves out the ways from a match to something longer that is not one yet, from "a" to "ab" in
        # "a(bc)?". With a sign behind it that stands in no text, nothing else is a match.
        index = Index(f"(?:{regex})\\x00", single)
        transitions, ends = index.get_transitions(), set(index.get_final_states())
    except (ValueError, TypeError, MemoryError) as error:
        return _line({"error": str(error).splitlines()[0] if str(error) else "takes too much memory"})
    final = [state for state, following in transitions.items() if following.get(0) in ends]
    number = {state: at for at, state in enumerate(transitions)}
    if len(number) > request["states"]:
        return _line({"error": f"needs {len(number)} states, more than {request['states']}"})
    table = array("i", [-1]) * (256 * len(number))
    for state, following in transitions.items():
        for byte, target in following.items():
            if 0 < byte < 256:
                table[256 * number[state] + byte] = number[target]
    first = number[index.get_initial_state()]
    head = {"states": len(number), "first": first, "final": [number[state] for state in final]}
    return _line(head) + table.tobytes()


def _line(head: dict[str, Any]) -> bytes:
    return json.dumps(head).encode() + b"\n"


if __name__ == "__main__":
    asked = json.loads(sys.stdin.readline())
    resource.setrlimit(resource.RLIMIT_AS, (asked["memory"],) * 2)
    resource.setrlimit(resource.RLIMIT_CPU, (asked["seconds"],) * 2)
    sys.stdout.buffer.write(compiled(asked))
