"""Text to measure on: named corpora, their tokens under a model's tokenizer, and the windows that a model reads.

T tokens of the corpus   L positions of a window   W windows

Some corpora are distributed as tokens between spaces. They are put back into the text that a tokenizer expects:
only spacing, quotation marks and escapes change. Words that a corpus has replaced (`<unk>`, PTB's `N`) stay: a
made-up word in their place would be another corpus.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dcdm.config import ConfigError, DataConfig, DataError, Documents, Split
from dcdm.data.sources import (
    OWN,
    STDLIB_SHARE,
    cut_into_parts,
    examine,
    read_texts,
    resolve,
    split_by_hash,
)
from dcdm.data.store import MANIFEST, PreparedData
from dcdm.data.tokenizers import Tokenizer
from dcdm.files import digest

BATCH = 1 << 20  # characters that are tokenised at one time
ROUND = 32  # short windows are padded to a multiple of this, whatever stands beside them in a batch


# --- detokenisers ------------------------------------------------------------------------------------------------


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


def detokenise_ptb(text: str) -> str:
    """Penn Treebank: brackets by name, escaped slashes, spacing."""
    for name, bracket in (("-LRB-", "("), ("-RRB-", ")"), ("-LCB-", "{"), ("-RCB-", "}")):
        text = text.replace(name, bracket).replace(name.lower(), bracket)
    return respaced(re.sub(r"\\([/*])", r"\1", text).strip())


def detokenise_wikitext(text: str) -> str:
    """WikiText: `@-@`, `@,@` and `@.@` inside words and numbers, headings, spacing, spaces at the ends of lines."""
    text = re.sub(r" @([-,.])@ ", r"\1", text)
    text = re.sub(r"^ +| +$", "", text, flags=re.MULTILINE)
    text = re.sub(r"^(?:= )+|(?: =)+$", lambda m: _heading(m[0]), text, flags=re.MULTILINE)
    return respaced(text)


def _heading(signs: str) -> str:
    joined = "=" * signs.count("=")
    return joined + " " if signs.startswith("=") else " " + joined


def detokenise_lambada(text: str) -> str:
    """LAMBADA: straight quotation marks for curly ones, spacing."""
    return respaced(text.translate(str.maketrans("“”‘’", "\"\"''")))


def split_articles(texts: Sequence[str]) -> list[str]:
    """WikiText, whether it comes as one text or line by line, cut before every heading of the first level."""
    joined = "".join(text if text.endswith("\n") else text + "\n" for text in texts)
    cuts = [match.start() for match in _ARTICLE.finditer(joined)]
    pieces = [joined[a:b] for a, b in zip([0, *cuts], [*cuts, len(joined)], strict=True)]
    return pieces if pieces[0].strip() else pieces[1:]


# --- corpora -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CorpusRecipe:
    """How a corpus of the paper is read."""

    detokenise: Detokeniser | None = None
    documents: Documents = "file"
    """What is one document in a text file."""
    cut: Callable[[Sequence[str]], list[str]] | None = None


PAPER = {
    "ptb": CorpusRecipe(detokenise_ptb, "lines"),
    "wikitext": CorpusRecipe(detokenise_wikitext, cut=split_articles),
    "lm1b": CorpusRecipe(respaced, "lines"),
    "lambada": CorpusRecipe(detokenise_lambada),
    "ag_news": CorpusRecipe(),
    "pubmed": CorpusRecipe(respaced),
    "arxiv": CorpusRecipe(respaced),
}
"""The corpora of the paper's zero-shot table, in its order."""


@dataclass(frozen=True)
class Corpus:
    """Documents, or prepared shards, under the name that tables give them."""

    name: str
    source: str
    texts: tuple[str, ...] = ()
    prepared: PreparedData | None = None
    split: Split | None = None
    """Which was read; None where all of the source was."""
    detokeniser: str = "none"
    fingerprint: str = ""
    """SHA-256 over the source's contents."""


@dataclass(frozen=True)
class TokenisedCorpus:
    """A corpus under one tokenizer: T tokens, every document closed by its EOS."""

    ids: np.ndarray
    document: np.ndarray
    """(T,) number of the document that a token belongs to."""
    size: np.ndarray
    """(T,) UTF-8 bytes that a token stands for; 0 for EOS."""
    prompt: np.ndarray | None = None
    """(T,) bool: tokens that are given, of fine-tuning examples; those stay apart from each other."""

    def borders(self) -> np.ndarray:
        """Where documents begin, and the end of the last: (D+1,)."""
        starts = np.flatnonzero(np.diff(self.document, prepend=-1))
        return np.append(starts, len(self.ids))


def read_corpora(specs: Sequence[str], field: str = "text", split: Split = "validation") -> list[Corpus]:
    """The corpora of `NAME=SOURCE` or `SOURCE`; names must differ."""
    corpora = [read_corpus(spec, field, split) for spec in specs]
    names = [corpus.name for corpus in corpora]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"two corpora are called {', '.join(twice)}; name them apart, as in NAME=PATH")
    return corpora


def read_corpus(spec: str, field: str = "text", split: Split = "validation") -> Corpus:
    """A corpus from local files, a folder of `dcdm data prepare`, a hub data set, `stdlib` or `addresses`.

    `field` holds the text of a row; `split` is that of packed shards, of the files of `stdlib` and of the documents
    of `addresses`, as training splits them: models that were trained on it have seen the others.
    """
    name, source = split_name(spec)
    if (Path(source).expanduser() / MANIFEST).is_file():
        prepared = PreparedData.open(source)
        if not prepared.documents(split):
            raise DataError(f"{source}: its {split} split is empty; choose the other one with --split")
        mark = digest([prepared.fingerprint, split])
        return Corpus(name, source, prepared=prepared, split=split, fingerprint=mark)
    recipe, part = PAPER.get(name, CorpusRecipe()), split if source in OWN else None
    share = 0.0 if part is None else STDLIB_SHARE
    wanted = DataConfig(documents=recipe.documents, field=field, validation_share=share)
    planned = examine([file for file in resolve(source, wanted) if part is None or file.split in (None, part)])
    texts = [
        text
        for cut in cut_into_parts(planned, wanted)
        for text, _ in read_texts(cut, wanted)
        if part is None or (cut.split or split_by_hash(text.encode(), share)) == part
    ]
    if recipe.cut is not None:
        texts = recipe.cut(texts)
    used = recipe.detokenise if is_tokenised(texts) else None
    texts = texts if used is None else [used(text) for text in texts]
    kept = [text for text in texts if text.strip()]
    if not kept:
        raise DataError(f"no text was found in {source}")
    return Corpus(
        name, source, tuple(kept), split=part, detokeniser=name if used else "none",
        fingerprint=digest([{**file.entry(), "split": part} for file in planned]),
    )  # fmt: skip


def split_name(spec: str) -> tuple[str, str]:
    """Name and source of `NAME=SOURCE`; a bare source is called by its file's name without the ending."""
    named = re.fullmatch(r"(?P<name>[\w.-]+)=(?P<source>.+)", spec)
    if named is not None and not Path(spec).exists():
        return named["name"], named["source"]
    path = Path(spec.removeprefix("hf:"))
    return path.name.partition(".")[0] or path.name, spec


def check_tokenizer(corpus: Corpus, tokenizer: Tokenizer) -> None:
    """Refuse shards that another tokenizer wrote."""
    if corpus.prepared is None or corpus.prepared.tokenizer.fingerprint == tokenizer.fingerprint:
        return
    wrote, reads = (f"{t.vocab_size:,} ids, {t.fingerprint[:12]}" for t in (corpus.prepared.tokenizer, tokenizer))
    raise DataError(
        f"{corpus.source} holds tokens of another tokenizer ({wrote}) than the model's ({reads}); "
        "give the text itself, or prepare it with the model's tokenizer"
    )


def tokenise(corpus: Corpus, tokenizer: Tokenizer) -> TokenisedCorpus:
    """The corpus as `tokenizer` writes it; shards must have been written by the same one."""
    check_tokenizer(corpus, tokenizer)
    if corpus.prepared is not None and corpus.split is not None:
        return _from_shards(corpus.prepared, corpus.split)
    ids, sizes, waiting, length = [], [], list[str](), 0
    for number, text in enumerate(corpus.texts, 1):
        waiting.append(text)
        length += len(text)
        if length >= BATCH or number == len(corpus.texts):
            for tokens, size in tokenizer.encode_sized(waiting):
                ids.append(np.append(tokens.astype(np.int64), tokenizer.eos_id))
                sizes.append(np.append(size, 0))
            waiting, length = [], 0
    document = np.repeat(np.arange(len(ids)), [len(one) for one in ids])
    return TokenisedCorpus(np.concatenate(ids), document, np.concatenate(sizes))


def _from_shards(prepared: PreparedData, split: Split) -> TokenisedCorpus:
    """Shards keep no text: every token gets the split's mean number of bytes, which is exact over all of it."""
    stream, eos = prepared.stream(split), prepared.tokenizer.eos_id
    ids = stream.read(0, len(stream))
    if prepared.fine_tuning:
        whole, given = prepared.lengths(split).T
        document = np.repeat(np.arange(len(whole)), whole)
        place = np.arange(len(ids)) - np.repeat(np.cumsum(whole) - whole, whole)
        prompt = place < np.repeat(given, whole)
    else:
        document, prompt = np.cumsum(ids == eos) - (ids == eos), None
    carries = (ids != eos) & (True if prompt is None else ~prompt)
    size = np.where(carries, prepared.text_bytes(split) / max(1, int(carries.sum())), 0.0)
    return TokenisedCorpus(ids, document, size, prompt)


# --- windows -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WindowSettings:
    """How a corpus is cut."""

    stride: int | None = None
    """Of a window only the last so many tokens count, the earlier ones are given; None: windows share nothing."""
    per_document: bool = False
    """Every document in windows of its own, instead of one stream as in training."""
    length: int | None = None
    """Positions, BOS among them; None: the model's context length."""
    limit: int | None = None
    """At most so many windows, spread evenly over the corpus."""

    def __post_init__(self) -> None:
        for name in ("stride", "limit"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value} must be at least 1")

    def check(self, length: int, longest: int) -> None:
        """Whether windows of `length` positions suit these settings and a model of `longest` positions."""
        if not 2 <= length <= longest:
            raise ConfigError(f"length={length} must lie between 2 and the model's max_position={longest}")
        if self.stride is not None and self.stride > length - 1:
            raise ConfigError(f"stride={self.stride} must be at most {length - 1}, the tokens of a window")


@dataclass(frozen=True)
class WindowBatch:
    tokens: Tensor
    """(B, L) BOS, tokens, PAD."""
    prompt: Tensor
    """(B, L) tokens that are given."""
    index: Tensor
    """(B,) number of the window in the corpus."""
    place: Tensor
    """(B, L) where in the corpus a counted token stands; −1 for all others."""


class CorpusWindows:
    """The windows of a corpus, of which `chosen` are measured."""

    def __init__(
        self, corpus: TokenisedCorpus, tokenizer: Tokenizer, length: int, settings: WindowSettings
    ) -> None:
        self.corpus, self.tokenizer, self.length = corpus, tokenizer, length
        per_document = settings.per_document or corpus.prompt is not None
        borders = corpus.borders() if per_document else np.array([0, len(corpus.ids)])
        spans = _spans(borders, length - 1, settings.stride or length - 1)
        self._counts = np.ones(len(corpus.ids), dtype=bool) if corpus.prompt is None else ~corpus.prompt
        before = np.concatenate([[0], np.cumsum(self._counts)])
        counted = before[spans[:, 2]] - before[spans[:, 1]]
        self.spans, counted = spans[counted > 0], counted[counted > 0]  # none that holds nothing but a prompt
        """(W, 3): a window's first token, its first that counts, and its end."""
        count = len(self.spans)
        kept = count if settings.limit is None else min(settings.limit, count)
        self.chosen = np.arange(kept) * count // kept
        self.left_out = int(counted.sum() - counted[self.chosen].sum())
        """Tokens of windows that are not chosen."""

    def groups(self, batch_size: int, rank: int = 0, world: int = 1) -> list[tuple[np.ndarray, int]]:
        """Every `world`-th batch from `rank` on: chosen windows of one padded size, and that size.

        Batches are the same for any number of processes, and so is what their windows score, to the last digit.
        """
        tokens = self.spans[self.chosen, 2] - self.spans[self.chosen, 0]
        sizes = np.minimum(self.length, -(-(tokens + 1) // ROUND) * ROUND)
        found = []
        for size in np.unique(sizes)[::-1].tolist():
            alike = self.chosen[sizes == size]
            found += [(alike[start : start + batch_size], size) for start in range(0, len(alike), batch_size)]
        return found[rank::world]

    def batches(self, batch_size: int, rank: int = 0, world: int = 1) -> Iterator[WindowBatch]:
        """The batches of a process, each made when it is asked for."""
        return (self._batch(numbers, size) for numbers, size in self.groups(batch_size, rank, world))

    def cut_documents(self) -> int:
        """Documents among the chosen windows that do not lie whole in one of them."""
        begin, _, end = self.spans[self.chosen].T
        borders = self.corpus.borders()
        first, last = self.corpus.document[begin], self.corpus.document[end - 1]
        return len({*first[borders[first] < begin].tolist(), *last[borders[last + 1] > end].tolist()})

    def _batch(self, numbers: np.ndarray, size: int) -> WindowBatch:
        tokens = np.full((len(numbers), size), self.tokenizer.pad_id, dtype=np.int64)
        place = np.full((len(numbers), size), -1, dtype=np.int64)
        tokens[:, 0] = self.tokenizer.bos_id
        for row, (begin, first, end) in enumerate(self.spans[numbers].tolist()):
            tokens[row, 1 : 1 + end - begin] = self.corpus.ids[begin:end]
            place[row, 1 + first - begin : 1 + end - begin] = np.arange(first, end)
        place = np.where((place >= 0) & self._counts[place], place, -1)
        prompt = (place < 0) & (tokens != self.tokenizer.pad_id)
        return WindowBatch(*(torch.from_numpy(array) for array in (tokens, prompt, numbers, place)))


def _spans(borders: np.ndarray, room: int, stride: int) -> np.ndarray:
    """Windows of up to `room` tokens between borders; after a stretch's first one each counts `stride` more."""
    spans = []
    for start, stop in zip(borders[:-1].tolist(), borders[1:].tolist(), strict=True):
        counted = start
        while counted < stop:
            end = min(stop, start + room if counted == start else counted + stride)
            spans.append((counted if stride == room else max(start, end - room), counted, end))
            counted = end
    return np.array(spans, dtype=np.int64).reshape(-1, 3)
