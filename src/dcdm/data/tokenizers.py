"""Text to ids and back. Every vocabulary ends with BOS, PAD and MASK.

First the `Tokenizer`, then the ways to get one (`load_tokenizer` knows them all), and last what it takes to make
any `tokenizer.json` fit.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from dcdm.config import NUM_SPECIALS, DataError
from dcdm.data.sources import hub_answers
from dcdm.files import UnreadableFile, digest, read_json_object, read_text, write_whole

T = TypeVar("T")

BOS_FOR = "bos_stands_for"
"""In tokenizer_config.json: the id that BOS stands for."""
MOST_HOLES = 1 << 16  # ids without a token; published tokenizers have a few thousand at most
MIN_BPE = 256 + 1 + NUM_SPECIALS + 1  # all bytes, EOS, the specials, and one merge
PROBES = (  # cut between the two, a tokenizer that allows it gives the tokens of both joined
    ("one", " two"), ("I", " A"), ("word.\n", "Next"), ("a\n", "b"), ("1\n", "2"), (")\n", "("), ("x,\n", '"y"'),
)  # fmt: skip
GUARD, MARK = "\ufdd0", "\ufdd1"
"""Two characters that Unicode keeps free for such use: the first stands within what is text although it is spelled
like a special token, the second around special tokens that a chat template writes."""
_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")  # how tokenizers with byte fallback call a byte


class Tokenizer:
    """A `tokenizers` tokenizer whose last three ids are BOS, PAD and MASK.

    `encode` reads text as text: a corpus that spells out "<|mask|>" or "<|endoftext|>" gives ordinary tokens,
    never special ones, and nothing is added at either end.
    """

    def __init__(
        self, backend: Backend, eos_id: int, chat_template: str | None = None, bos_for: int | None = None
    ) -> None:
        """`bos_for` is a token of a pretrained model that BOS stands for: chats may begin with it."""
        self.backend, self.bos_for = backend, bos_for
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.eos_id = eos_id
        self.bos_id, self.pad_id, self.mask_id = range(self.vocab_size - NUM_SPECIALS, self.vocab_size)
        self.chat_template = chat_template
        self.eos_token = str(backend.id_to_token(eos_id))
        own = (number for number, token in backend.get_added_tokens_decoder().items() if token.special)
        self._special = {eos_id, self.bos_id, self.pad_id, self.mask_id, *own}
        self._plain = Backend.from_str(backend.to_str())
        self._plain.encode_special_tokens = True
        spec = json.loads(backend.to_str())
        self._is_bytes = _spells_bytes(spec)
        self._is_byte_level = (spec["decoder"] or {}).get("type") == "ByteLevel"

    @classmethod
    def over(
        cls, base: Backend, eos: str | None = None, chat_template: str | None = None,
        specials: Sequence[str | None] = (), bos_for: int | None = None,
    ) -> Tokenizer:  # fmt: skip
        """`base` with an EOS of its own if `eos` is not among its tokens, then BOS, PAD and MASK.

        If the tokens named as BOS, PAD and MASK in `specials` are its last three ids already, nothing is added, and
        `bos_for` is taken over.
        """
        size = base.get_vocab_size(with_added_tokens=True)
        eos_id = base.token_to_id(eos or "")
        if eos_id is not None and [base.token_to_id(name or "") for name in specials] == [
            *range(size - NUM_SPECIALS, size)
        ]:
            return cls(base, eos_id, chat_template, bos_for)
        backend = _without_holes(json.loads(base.to_str()))
        if eos is None or backend.token_to_id(eos) is None:
            eos = _free_name(backend, "eos")
        names = [eos, *(_free_name(backend, name) for name in ("bos", "pad", "mask"))]
        backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
        eos_id, *ids = (backend.token_to_id(name) for name in names)
        size = backend.get_vocab_size(with_added_tokens=True)
        if eos_id is None or ids != [*range(size - NUM_SPECIALS, size)]:
            raise DataError(f"BOS, PAD and MASK got the ids {ids} of {size}, not the last three")
        return cls(backend, eos_id, chat_template)

    def with_bos_for(self, token: int) -> Tokenizer:
        """The same tokenizer, its BOS standing for this token."""
        return Tokenizer(self.backend, self.eos_id, self.chat_template, token)

    def as_text(self, content: str) -> str:
        """A message's text for a chat template: nothing in it is taken for a special token afterwards."""
        content = content.replace(GUARD, "�").replace(MARK, "�")
        while self._own_specials and self._own_specials.search(content):
            content = self._own_specials.sub(lambda found: found[0][0] + GUARD + found[0][1:], content)
        return content

    @cached_property
    def _own_specials(self) -> re.Pattern[str] | None:
        """The names of the base tokenizer's special tokens."""
        known = self.backend.get_added_tokens_decoder().items()
        names = [
            one.content for number, one in known if one.special and number < self.bos_id and len(one.content) > 1
        ]
        return re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True)))) if names else None

    def encode_chat(self, text: str) -> list[int]:
        """Ids of what a chat template wrote, to come behind BOS."""
        return self.behind_bos(self.encode_arrays([text], templated=True)[0]).tolist()

    def behind_bos(self, ids: np.ndarray) -> np.ndarray:
        """`ids` without a first token that BOS stands for."""
        return ids[1:] if len(ids) and ids[0] == self.bos_for else ids

    def encode(self, text: str) -> list[int]:
        return self.encode_arrays([text])[0].tolist()

    def encode_arrays(self, texts: Sequence[str], templated: bool = False) -> list[np.ndarray]:
        """Ids of every text as arrays.

        `templated` text comes from a chat template: there the base tokenizer's own special tokens are meant
        (BOS, PAD and MASK are not), but for those in messages, which `as_text` has guarded.
        """
        if templated and not self._is_bytes:
            backend, ids = self._template_backend
            encoded = backend.encode_batch_fast([self._marked(text) for text in texts], add_special_tokens=False)
            return [ids[item.ids] for item in encoded]
        texts = [text.replace(GUARD, "") for text in texts] if templated else texts
        if self._is_bytes:
            return [np.frombuffer(text.encode(), dtype=np.uint8) for text in texts]
        encoded = self._plain.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(item.ids, dtype=np.uint32) for item in encoded]

    def encode_sized(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Ids of every text, and the UTF-8 bytes of it that each id stands for; these add up to the text's.

        Where several ids share one character its bytes count for the first of them; what no id covers, such as
        space that a tokenizer drops, counts for the id after it, at the end of a text for the last one.
        """
        if self._is_bytes:
            return [(ids, np.ones(len(ids), dtype=np.int64)) for ids in self.encode_arrays(texts)]
        encoded = self._plain.encode_batch(list(texts), add_special_tokens=False)
        return [
            (np.asarray(item.ids, dtype=np.uint32), _byte_counts(text, [end for _, end in item.offsets]))
            for text, item in zip(texts, encoded, strict=True)
        ]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of the ids; specials and EOS are left out, broken UTF-8 shows as �."""
        kept = [i for i in map(int, ids) if i not in self._special]
        return self.backend.decode(kept, skip_special_tokens=True)

    def continuation(self, ids: Iterable[int]) -> str:
        """Text of ids that follow others: tokenizers that drop a text's first space would drop theirs."""
        if self._is_byte_level or self._is_bytes:
            return self.decode(ids)
        before = self.encode("a")
        return self.decode([*before, *ids]).removeprefix(self.decode(before))

    def pieces(self, ids: Iterable[int]) -> list[bytes]:
        """The bytes of text that each token stands for, none for specials and EOS; joined they are the text.

        Tokens of a byte-level tokenizer, and byte tokens of others, may be parts of letters. Of other tokenizers, a
        token is what it adds behind a letter.
        """
        return [b"" if i in self._special else self._piece(i) for i in map(int, ids)]

    def name(self, token: int) -> str | None:
        """How a special token or EOS is called; None for ordinary ones."""
        return str(self.backend.id_to_token(token)) if token in self._special else None

    def _piece(self, token: int) -> bytes:
        if self._is_byte_level:
            return bytes(_BYTE_OF[letter] for letter in str(self.backend.id_to_token(token)) if letter in _BYTE_OF)
        if single := _BYTE_TOKEN.fullmatch(str(self.backend.id_to_token(token))):
            return bytes([int(single[1], 16)])
        return self.continuation([token]).encode()

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over what decides ids and text; equal for equal tokenizers, however they were stored."""
        content = _pruned(json.loads(self.backend.to_str()))
        more = [] if self.bos_for is None else [self.bos_for]
        return digest([content, self.eos_id, self.bos_id, self.chat_template, *more])

    @cached_property
    def cuts_between_words(self) -> bool:
        """Whether text cut at `BETWEEN_WORDS` gives the tokens of the whole, as byte-level tokenizers do."""
        return all(self.encode(left + right) == self.encode(left) + self.encode(right) for left, right in PROBES)

    def save(self, folder: Path | str, specials: bool = True) -> None:
        """Write `tokenizer.json` and `tokenizer_config.json`, which `AutoTokenizer` loads with the same ids.

        Without `specials` there are no BOS, PAD and MASK: EOS pads.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        config: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "eos_token": self.eos_token,
        }
        backend = self.backend
        if specials:
            for name, number in (("bos", self.bos_id), ("pad", self.pad_id), ("mask", self.mask_id)):
                config[f"{name}_token"] = backend.id_to_token(number)
        else:
            config["pad_token"] = self.eos_token
            spec = json.loads(backend.to_str())
            spec["added_tokens"] = [token for token in spec["added_tokens"] if token["id"] < self.bos_id]
            backend = Backend.from_str(json.dumps(spec))
        if self.chat_template is not None:
            config["chat_template"] = self.chat_template
        if self.bos_for is not None and specials:
            config[BOS_FOR] = self.bos_for
        write_whole(folder / "tokenizer.json", backend.to_str(pretty=False).encode())
        write_whole(folder / "tokenizer_config.json", (json.dumps(config, indent=2) + "\n").encode())

    @classmethod
    def load(cls, folder: Path | str) -> Tokenizer:
        """What `save` wrote, or any folder with a `tokenizer.json` (EOS and specials are then appended)."""
        folder = Path(folder)
        config = _config(folder)
        spec = _readable(folder / "tokenizer.json", read_json_object)
        try:
            base = _without_holes(spec)
        except Exception as error:  # the library raises bare Exception for what it cannot read
            raise DataError(f"cannot read {folder / 'tokenizer.json'}: {error}") from error
        eos, *specials = (_content(config.get(f"{name}_token")) for name in ("eos", "bos", "pad", "mask"))
        bos_for = config.get(BOS_FOR)
        if bos_for is not None and (type(bos_for) is not int or base.id_to_token(bos_for) is None):
            raise DataError(f"{folder / 'tokenizer_config.json'}: {BOS_FOR}={bos_for!r} is not one of its tokens")
        return cls.over(base, eos, _chat_template(folder, config), specials, bos_for)

    def _marked(self, text: str) -> str:
        """What a chat template wrote, with marks around its special tokens and none in its messages."""
        if self._own_specials is not None:
            text = self._own_specials.sub(lambda found: f"{MARK}{found[0]}{MARK}", text)
        return text.replace(GUARD, "")

    @cached_property
    def _template_backend(self) -> tuple[Backend, np.ndarray]:
        """A tokenizer that knows special tokens by their marks alone, and what each of its ids is among ours."""
        spec = json.loads(self.backend.to_str())
        spec["added_tokens"] = [token for token in spec["added_tokens"] if token["id"] < self.bos_id]
        for token in spec["added_tokens"]:
            token["content"] = self._marked(token["content"]) if token["special"] else token["content"]
        backend = Backend.from_str(json.dumps(spec))
        vocab = backend.get_vocab(with_added_tokens=True)
        ids = np.arange(max(vocab.values(), default=0) + 1, dtype=np.uint32)
        for token in spec["added_tokens"]:
            ids[vocab[token["content"]]] = token["id"]
        return backend, ids


# --- the ways to get one -----------------------------------------------------------------------------------------


def load_tokenizer(spec: str, documents: Iterable[str] | None = None) -> Tokenizer:
    """The tokenizer called `spec`: `bytes`, `bpe:N` (learned from `documents`), a local folder, or a hub name."""
    if spec == "bytes":
        return byte_tokenizer()
    if (size := bpe_size(spec)) is not None:
        if documents is None:
            raise DataError(f"{spec} is learned from a corpus, and none was given")
        return train_bpe(documents, size)
    folder = Path(spec).expanduser()
    if (folder / "tokenizer.json").is_file():
        return Tokenizer.load(folder)
    if (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        config = _config(folder)
        if config.get("tokenizer_class", "GPT2Tokenizer").startswith("GPT2"):
            return adopted(ask_transformers(spec, "GPT2TokenizerFast"), spec)
    if folder.is_file():
        raise DataError(f"tokenizer {spec}: this is a file; name the folder that holds tokenizer.json")
    if spec.startswith((".", "/", "~")) and not folder.exists():
        raise DataError(f"tokenizer {spec}: there is no such folder")
    return adopted(ask_transformers(spec), spec)


def byte_tokenizer() -> Tokenizer:
    """UTF-8 bytes 0…255, EOS 256, then BOS 257, PAD 258 and MASK 259."""
    vocab = {letter: byte for byte, letter in enumerate(_byte_letters())}
    return Tokenizer.over(_byte_level(models.BPE(vocab, [])))


def bpe_size(spec: str) -> int | None:
    """N of `bpe:N`; None for any other tokenizer."""
    if not spec.startswith("bpe:"):
        return None
    if not re.fullmatch(r"bpe:[0-9]+", spec):
        raise DataError(f"tokenizer {spec!r}: after bpe: comes the vocabulary's size, as in bpe:8192")
    return int(spec.removeprefix("bpe:"))


def train_bpe(documents: Iterable[str], size: int) -> Tokenizer:
    """Byte-level BPE learned from `documents`; `size` counts every id, EOS and specials among them."""
    if size < MIN_BPE:
        raise DataError(f"bpe:{size} is too small; all bytes, EOS, the specials and one merge need {MIN_BPE}")
    backend = _byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=size - 1 - NUM_SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[],
        show_progress=False,
    )
    backend.train_from_iterator(documents, trainer)
    tokenizer = Tokenizer.over(backend)
    if tokenizer.vocab_size != size:
        raise DataError(
            f"bpe:{size}: this text yields no more than {tokenizer.vocab_size} tokens; "
            f"ask for bpe:{tokenizer.vocab_size} or give more text"
        )
    return tokenizer


def ask_transformers(spec: str, reader: str = "AutoTokenizer", **options: Any) -> Any:
    """The tokenizer that `transformers` makes of a folder or a hub name; `reader` is its class there."""
    import transformers

    is_here = Path(spec).is_dir()
    answers = is_here or hub_answers()
    try:
        chosen = getattr(transformers, reader)
        return chosen.from_pretrained(spec, local_files_only=is_here, trust_remote_code=False, **options)
    except Exception as error:  # network, cache, repository and format errors have no common base
        lines = str(error).strip().splitlines()
        reason = lines[0] if lines else type(error).__name__
        why = f"transformers cannot load it: {reason}"
        if is_here:
            raise DataError(f"the tokenizer in {spec}: {why}") from error
        why = why if answers else "the hub cannot be reached"
        raise DataError(f"tokenizer {spec!r} is neither bytes, bpe:N nor a folder here, and {why}") from error


def adopted(loaded: Any, name: str) -> Tokenizer:
    """A tokenizer of `transformers` as ours; `name` is for messages."""
    backend = getattr(loaded, "backend_tokenizer", None)
    if backend is None:
        raise DataError(f"tokenizer {name!r} has no fast version; choose one with a tokenizer.json")
    template = loaded.chat_template
    if isinstance(template, dict):  # several by name
        template = template.get("default")
    specials = (loaded.bos_token, loaded.pad_token, loaded.mask_token)
    return Tokenizer.over(backend, loaded.eos_token, template, specials)


def _byte_level(model: models.BPE) -> Backend:
    backend = Backend(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


# --- spelling bytes ----------------------------------------------------------------------------------------------


def _byte_letters() -> list[str]:
    """The letter by which byte-level tokenizers write each byte: itself if it shows, else one from U+0100 on."""
    shown = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = iter(range(0x100, 0x200))
    return [chr(byte if byte in shown else next(hidden)) for byte in range(256)]


_BYTE_OF = {letter: byte for byte, letter in enumerate(_byte_letters())}


def _spells_bytes(spec: dict[str, Any]) -> bool:
    """Whether ids 0…255 are the bytes and text is spelled with them alone."""
    model = spec["model"]
    plain = model["type"] == "BPE" and not model["merges"] and spec["normalizer"] is None
    level = spec["pre_tokenizer"] or {}
    if not plain or level.get("type") != "ByteLevel" or level.get("add_prefix_space"):
        return False
    return len(model["vocab"]) == 256 and all(model["vocab"].get(c) == b for b, c in enumerate(_byte_letters()))


def _byte_counts(text: str, ends: list[int]) -> np.ndarray:
    """Bytes of the text between the ends, in characters, of one token and the next."""
    letters = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
    width = 1 + (letters >= 0x80).astype(np.int64) + (letters >= 0x800) + (letters >= 0x10000)
    upto = np.concatenate([[0], np.cumsum(width)])
    reached = upto[np.maximum.accumulate(np.asarray(ends, dtype=np.int64))] if ends else upto[:0]
    if len(reached):
        reached[-1] = upto[-1]
    return np.diff(reached, prepend=0)


# --- what a tokenizer's files hold -------------------------------------------------------------------------------


def _config(folder: Path) -> dict[str, Any]:
    path = folder / "tokenizer_config.json"
    return _readable(path, read_json_object) if path.exists() else {}


def _readable(path: Path, read: Callable[[Path], T]) -> T:
    try:
        return read(path)
    except UnreadableFile as error:
        raise DataError(f"cannot read {path}: {error}") from error


def _content(token: Any) -> str | None:
    """A special token's text: configs spell it as a string or as an object."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    if (file := folder / "chat_template.jinja").exists():
        return _readable(file, read_text)
    template = config.get("chat_template")
    if isinstance(template, list):  # several, by name
        named = [entry for entry in template if isinstance(entry, dict) and entry.get("name") == "default"]
        template = named[-1].get("template") if named else None
    return template if isinstance(template, str) else None


def _without_holes(spec: dict[str, Any]) -> Backend:
    """A tokenizer.json's tokenizer, alone: nothing padded, cut or added around a text, and ids without a gap.

    The library numbers added tokens by counting, so that a gap would put two tokens on one id. Gaps are
    filled with tokens that no text gives.
    """
    spec["padding"] = spec["truncation"] = spec["post_processor"] = None
    spec["model"].pop("dropout", None)  # it would draw ids at random
    vocab, added = spec["model"]["vocab"], {token["id"]: token for token in spec["added_tokens"]}
    taken = dict.fromkeys(range(len(vocab))) if isinstance(vocab, list) else {i: t for t, i in vocab.items()}
    ids = taken.keys() | added.keys()
    if not all(type(number) is int and number >= 0 for number in ids):
        raise DataError("the tokenizer has an id that is not a whole number of at least 0")
    if (holes := max(ids, default=-1) + 1 - len(ids)) > MOST_HOLES:
        raise DataError(f"the tokenizer leaves out {holes:,} ids; a tokenizer may leave out {MOST_HOLES:,}")
    top = max(taken, default=-1) + 1
    for number in range(top):
        if number not in taken:
            vocab[added[number]["content"] if number in added else f"<|unused_{number}|>"] = number
    for number in range(top, max(added, default=-1) + 1):
        if number not in added:
            filler = {"id": number, "content": f"<|unused_{number}|>", "special": True, "normalized": False}
            added[number] = {**filler, "single_word": False, "lstrip": False, "rstrip": False}
    spec["added_tokens"] = [added[number] for number in sorted(added)]
    backend = Backend.from_str(json.dumps(spec))
    for number, token in added.items():
        if backend.token_to_id(token["content"]) != number:
            raise DataError(f"the tokenizer gives its token {token['content']!r} two ids")
    return backend


def _free_name(backend: Backend, word: str) -> str:
    name, tries = f"<|{word}|>", 1
    while backend.token_to_id(name) is not None:
        name, tries = f"<|{word}_{tries}|>", tries + 1
    return name


def _pruned(value: Any) -> Any:
    """`value` without what is null, false or empty, so that a library's new defaults change no fingerprint."""
    if isinstance(value, dict):
        pruned = {key: _pruned(item) for key, item in value.items() if key != "version"}
        if isinstance(merges := pruned.get("merges"), list):  # "a b" in old files, ["a", "b"] in new ones
            pruned["merges"] = [m.split(" ", 1) if isinstance(m, str) else m for m in merges]
        return {k: v for k, v in pruned.items() if v is not None and v is not False and v not in ("", [], {})}
    return [_pruned(item) for item in value] if isinstance(value, list) else value
