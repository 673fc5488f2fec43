import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer

import dcdm
from corpora import gpt2_style_folder, metaspace_tokenizer, prose
from dcdm.config import DataError
from dcdm.data.sources import BETWEEN_WORDS
from dcdm.data.tokenizers import Tokenizer, byte_tokenizer, load_tokenizer, train_bpe

SAMPLE = "naïve 東京\n<b> 12  \t x\r\n 👩‍🚀 don't  \n\n end"
BPE = train_bpe([prose(400)], 310)
BYTES = byte_tokenizer()


@pytest.fixture(scope="module", params=["bytes", "bpe:310", "gpt2"])
def tokenizer(request, tmp_path_factory):
    if request.param == "gpt2":
        return load_tokenizer(str(gpt2_style_folder(tmp_path_factory.mktemp("gpt2"))))
    return BYTES if request.param == "bytes" else BPE


def test_specials_are_the_last_three_ids_and_eos_is_an_ordinary_one(tokenizer):
    size = tokenizer.vocab_size
    assert (tokenizer.bos_id, tokenizer.pad_id, tokenizer.mask_id) == (size - 3, size - 2, size - 1)
    assert tokenizer.eos_id == size - 4
    assert sorted(tokenizer.backend.get_vocab().values()) == list(range(size))


def test_bytes_are_their_own_ids_and_fit_the_debug_presets():
    config = dcdm.preset("dcdm-debug")
    assert BYTES.encode(SAMPLE) == list(SAMPLE.encode())
    assert (BYTES.vocab_size, BYTES.eos_id) == (260, 256)
    assert (config.vocab_size, config.bos_id, config.pad_id, config.mask_id) == (260, 257, 258, 259)


def test_a_gpt2_folder_keeps_its_end_of_text_as_eos_and_gains_three_ids(tmp_path):
    tokenizer = load_tokenizer(str(gpt2_style_folder(tmp_path)))
    size = len(json.loads((tmp_path / "vocab.json").read_text()))
    assert (tokenizer.vocab_size, tokenizer.eos_token, tokenizer.eos_id) == (size + 3, "<|endoftext|>", size - 1)


def test_text_survives_encoding_and_specials_are_left_out_of_decoded_text(tokenizer):
    ids = [tokenizer.bos_id, *tokenizer.encode(SAMPLE), tokenizer.eos_id, tokenizer.mask_id, tokenizer.pad_id]
    assert tokenizer.decode(ids) == SAMPLE
    together = [ids.tolist() for ids in tokenizer.encode_arrays([SAMPLE, "", "a"])]
    assert together == [tokenizer.encode(SAMPLE), [], tokenizer.encode("a")]


@given(st.text())
def test_any_text_survives_a_round_trip(text):
    for tokenizer in (BYTES, BPE):
        assert tokenizer.decode(tokenizer.encode(text)) == text


@given(st.lists(st.sampled_from(["one", " two", "\n", ".", " ", "x", "\t", "東", "1", "'s", "\n\n"]), max_size=40))
def test_text_cut_between_words_gives_the_tokens_of_the_whole(parts):
    text = "".join(parts)
    assert BPE.cuts_between_words
    cuts = [0, *(match.end() for match in BETWEEN_WORDS.finditer(text)), len(text)]
    pieces = [text[a:b] for a, b in pairwise(cuts)]
    assert [i for piece in pieces for i in BPE.encode(piece)] == BPE.encode(text)


def test_text_that_spells_a_special_token_never_becomes_one(tokenizer):
    names = [tokenizer.backend.id_to_token(i) for i in range(tokenizer.eos_id, tokenizer.vocab_size)]
    text = "a".join(names)
    ids = tokenizer.encode(text)
    assert max(ids) < tokenizer.eos_id
    assert tokenizer.decode(ids) == text


def test_a_saved_tokenizer_keeps_its_ids_and_fingerprint_and_loads_with_transformers(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    loaded = Tokenizer.load(tmp_path)
    assert loaded.fingerprint == tokenizer.fingerprint == load_tokenizer(str(tmp_path)).fingerprint
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert len(theirs) == loaded.vocab_size == tokenizer.vocab_size
    assert theirs(SAMPLE)["input_ids"] == loaded.encode(SAMPLE) == tokenizer.encode(SAMPLE)
    assert theirs.decode(tokenizer.encode(SAMPLE)) == SAMPLE
    ids = (theirs.eos_token_id, theirs.bos_token_id, theirs.pad_token_id, theirs.mask_token_id)
    assert ids == (tokenizer.eos_id, tokenizer.bos_id, tokenizer.pad_id, tokenizer.mask_id)
    theirs.save_pretrained(tmp_path / "again")
    assert load_tokenizer(str(tmp_path / "again")).vocab_size == tokenizer.vocab_size


def test_fingerprints_tell_tokenizers_apart():
    other_text = train_bpe([prose(400, seed=5)], 310)
    with_chat = Tokenizer(BPE.backend, BPE.eos_id, "{{ messages }}")
    prints = [t.fingerprint for t in (BYTES, BPE, other_text, train_bpe([prose(400)], 300), with_chat)]
    assert len(set(prints)) == len(prints)


def _with_holes():
    """Ids 0, 1, 4 in the model, an added token in the gap, another far beyond the end."""
    spec = json.loads(Backend(models.WordLevel({"a": 0, "b": 1, "c": 4}, unk_token="a")).to_str())
    common = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    spec["added_tokens"] = [{"id": 2, "content": "<gap>", **common}, {"id": 7, "content": "<far>", **common}]
    spec["pre_tokenizer"] = {"type": "Whitespace"}
    return spec


def test_a_vocabulary_with_holes_keeps_its_ids_and_specials_come_after_all_of_them(tmp_path):
    (tmp_path / "tokenizer.json").write_text(json.dumps(_with_holes()))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<far>"}}))
    tokenizer = load_tokenizer(str(tmp_path))
    vocab = tokenizer.backend.get_vocab()
    assert [vocab[token] for token in ("a", "b", "<gap>", "c", "<far>")] == [0, 1, 2, 4, 7]
    assert (tokenizer.eos_id, tokenizer.vocab_size, tokenizer.mask_id) == (7, 11, 10)
    assert tokenizer.encode("b c") == [1, 4]
    tokenizer.save(tmp_path / "saved")
    assert len(AutoTokenizer.from_pretrained(tmp_path / "saved")) == 11
    assert Tokenizer.load(tmp_path / "saved").backend.get_vocab() == vocab


def test_what_a_tokenizer_adds_pads_or_cuts_is_switched_off(tmp_path):
    backend = Backend(models.WordLevel({"[CLS]": 0, "[SEP]": 1, "[PAD]": 2, "<|mask|>": 3, "a": 4}, unk_token="a"))
    backend.normalizer, backend.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.Whitespace()
    backend.add_special_tokens([AddedToken("[CLS]"), AddedToken("[SEP]")])
    backend.post_processor = processors.BertProcessing(("[SEP]", 1), ("[CLS]", 0))
    backend.enable_padding(length=8, pad_id=2)
    backend.enable_truncation(3)
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer.encode("a A a a a") == [4] * 5
    assert tokenizer.vocab_size == 5 + 4
    assert tokenizer.backend.id_to_token(tokenizer.mask_id) == "<|mask_1|>"
    assert tokenizer.eos_id == 5


def test_a_hub_name_goes_through_transformers(monkeypatch):
    import transformers

    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=BPE.backend, eos_token="<|eos|>")
    theirs.chat_template = "{{ messages }}"
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda name, **_: {"org/name": theirs}[name])
    tokenizer = load_tokenizer("org/name")
    assert (tokenizer.vocab_size, tokenizer.eos_id) == (313, BPE.eos_id)
    assert tokenizer.chat_template == "{{ messages }}"


def test_wrong_tokenizers_are_refused_with_the_reason(tmp_path):
    (tmp_path / "file").write_text("")
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "tokenizer.json").write_text("{")
    for spec, documents, reason in (
        ("bpe:many", [], "vocabulary's size"),
        ("bpe:256", ["text"], "need 261"),
        ("bpe:5000", ["a b a b"], "give more text"),
        ("bpe:300", None, "learned from a corpus"),
        ("./nowhere", None, "no such folder"),
        (str(tmp_path / "file"), None, "this is a file"),
        (str(broken), None, "tokenizer.json"),
        ("no-such/tokenizer", None, "transformers cannot load it|cannot be reached"),
    ):
        with pytest.raises(DataError, match=reason):
            load_tokenizer(spec, documents)


def test_words_that_begin_with_a_space_keep_it_behind_a_text():
    tokenizer = metaspace_tokenizer([f"<0x{byte:02X}>" for byte in range(256)])
    base = tokenizer.backend
    with_space, without = base.token_to_id("\u2581the"), base.token_to_id("the")
    assert tokenizer.decode([with_space]) == "the"
    assert tokenizer.continuation([with_space, without]) == " thethe"
    assert tokenizer.pieces([with_space, without, base.token_to_id("<0xE6>")]) == [b" the", b"the", b"\xe6"]
