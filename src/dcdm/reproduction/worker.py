"""One run in a process of its own: `python -m dcdm.reproduction.worker` with the queue's settings as JSON."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

from dcdm.reproduction.runs import Places, RunSpec, carry_out
from dcdm.reproduction.scale import scale
from dcdm.reproduction.variants import variants


def main(text: str) -> int:
    """Carry out the run that `text` describes; 130 if asked to stop."""
    given = json.loads(text)
    chosen = scale(given["scale"])
    spec = RunSpec(chosen, variants(chosen)[given["variant"]], given["seed"])
    places = Places(*(Path(given[name]) for name in ("data", "work", "results")))
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return carry_out(spec, places)
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
