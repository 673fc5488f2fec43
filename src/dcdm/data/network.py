"""Whether the Hugging Face hub answers, asked once, so that a misspelt name fails at once without a network."""

from __future__ import annotations

import os
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

PATIENCE = 3.0  # seconds


@contextmanager
def quick_hub(wanted: bool = True) -> Iterator[bool]:
    """Look into caches alone where the hub does not answer: its libraries would try again and again.

    Gives whether it answers. If it is not `wanted`, since all is here, it is not even asked.
    """
    import datasets.config
    import huggingface_hub.constants

    answers = wanted and not huggingface_hub.constants.HF_HUB_OFFLINE and hub_answers()
    if answers:
        yield True
        return
    places = [huggingface_hub.constants, datasets.config]
    before = [place.HF_HUB_OFFLINE for place in places]
    for place in places:
        place.HF_HUB_OFFLINE = True
    try:
        yield False
    finally:
        for place, own in zip(places, before, strict=True):
            place.HF_HUB_OFFLINE = own


@cache
def hub_answers() -> bool:
    """Whether the hub, or a mirror that HF_ENDPOINT names, answers anything within `PATIENCE`; proxies are used."""
    request = urllib.request.Request(os.environ.get("HF_ENDPOINT") or "https://huggingface.co", method="HEAD")
    answered = threading.Event()

    def ask() -> None:
        try:
            urllib.request.urlopen(request, timeout=PATIENCE).close()
        except urllib.error.HTTPError:
            pass  # whoever answers is there
        except (OSError, ValueError):
            return
        answered.set()

    asking = threading.Thread(target=ask, daemon=True)  # looking up a name has no limit of time of its own
    asking.start()
    asking.join(PATIENCE)
    return answered.is_set()
