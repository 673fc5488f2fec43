"""Corpora that are distributed as tokens between spaces, put back into the text that a tokenizer expects.

Only spacing, quotation marks and escapes change. Words that a corpus has replaced (`<unk>`, PTB's `N`) stay: a
made-up word in their place would be another corpus.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import cycle

Detokeniser = Callable[[str], str]

_MARKS = r"[,.;:?!]|n't\b|'(?:s|m|d|re|ve|ll)\b"
_APART = re.compile(rf"(?<=\w) (?:{_MARKS})(?=\s|$)", re.IGNORECASE | re.MULTILINE)
_ATTACHED = re.compile(rf"(?<=\w)(?:{_MARKS})(?=\s|$)", re.IGNORECASE | re.MULTILINE)

_BEFORE = re.compile(rf" +(?=(?:{_MARKS}|[%)\]}}]|\.\.\.)(?:[\s,.;:?!)\]\"']|$))", re.IGNORECASE | re.MULTILINE)
_AFTER = re.compile(r"(?<=[(\[{$£#]) +")
_QUOTE = re.compile(r"(?<!\S)\"(?!\S)")
_ARTICLE = re.compile(r"^ ?= [^=\n]+ = ?$", re.MULTILINE)


def is_tokenised(texts: Sequence[str]) -> bool:
    """Whether punctuation and contractions mostly stand apart from the words before them."""
    apart = sum(len(_APART.findall(text)) for text in texts)
    return apart > sum(len(_ATTACHED.findall(text)) for text in texts)


def respaced(text: str) -> str:
    """Punctuation, brackets, contractions and quotation marks back at their words."""
    text = re.sub(r"`` ?", '"', text)
    text = re.sub(r" ?''", '"', text)
    text = "\n".join(_paired_quotes(line) for line in text.split("\n"))
    return _AFTER.sub("", _BEFORE.sub("", text))


def _paired_quotes(line: str) -> str:
    """Of the double quotes that stand alone in a line, the odd ones open and the even ones close."""
    sides = cycle(("open", "close"))
    marked = _QUOTE.sub(lambda _: "\0" if next(sides) == "open" else "\1", line)
    return marked.replace("\0 ", '"').replace(" \1", '"').replace("\0", '"').replace("\1", '"')


def ptb(text: str) -> str:
    """Penn Treebank: brackets by name, escaped slashes, spacing."""
    for name, bracket in (("-LRB-", "("), ("-RRB-", ")"), ("-LCB-", "{"), ("-RCB-", "}")):
        text = text.replace(name, bracket).replace(name.lower(), bracket)
    return respaced(re.sub(r"\\([/*])", r"\1", text).strip())


def wikitext(text: str) -> str:
    """WikiText: `@-@`, `@,@` and `@.@` inside words and numbers, headings, spacing, spaces at the ends of lines."""
    text = re.sub(r" @([-,.])@ ", r"\1", text)
    text = re.sub(r"^ +| +$", "", text, flags=re.MULTILINE)
    text = re.sub(r"^(?:= )+|(?: =)+$", lambda m: _heading(m[0]), text, flags=re.MULTILINE)
    return respaced(text)


def _heading(signs: str) -> str:
    joined = "=" * signs.count("=")
    return joined + " " if signs.startswith("=") else " " + joined


def lambada(text: str) -> str:
    """LAMBADA: straight quotation marks for curly ones, spacing."""
    return respaced(text.translate(str.maketrans("“”‘’", "\"\"''")))


def articles(texts: Sequence[str]) -> list[str]:
    """WikiText, whether it comes as one text or line by line, cut before every heading of the first level."""
    joined = "".join(text if text.endswith("\n") else text + "\n" for text in texts)
    cuts = [match.start() for match in _ARTICLE.finditer(joined)]
    pieces = [joined[a:b] for a, b in zip([0, *cuts], [*cuts, len(joined)], strict=True)]
    return pieces if pieces[0].strip() else pieces[1:]
