"""The model as the lm-evaluation-harness sees it."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import pytest
import torch

import pretrained
import tiny

pytest.importorskip("lm_eval", reason="needs the extra [eval]")

from lm_eval.api.instance import Instance
from lm_eval.api.model import CachingLM
from lm_eval.models.huggingface import HFLM
from safetensors.torch import save_file
from tokenizers.processors import TemplateProcessing
from transformers import Qwen3Config, Qwen3ForCausalLM

import dcdm
from dcdm.config import ConfigError
from dcdm.data.tokenizers import Tokenizer, byte_tokenizer, train_bpe
from dcdm.evaluation.harness import Estimate, HarnessModel, is_greedy
from dcdm.keys import Key
from dcdm.likelihood import estimators as likelihood
from dcdm.likelihood.subsets import sampled_subsets

TEXT = "the quick brown fox jumps over the lazy dog, and the dog sleeps on. "
SAMPLE = ["ar", "mdlm", "bdlm", "paper", "causal", "random"]
WINDOW = 24


def adapter(kind: str = "mdlm", scale: float = 4.0, **settings) -> HarnessModel:
    model = tiny.model(kind, symbols=257, scale=scale)
    return HarnessModel((model, byte_tokenizer()), **{"samples": 4, "max_length": WINDOW, **settings})


def question(context: str, *choices: str, doc: int = 0) -> list[Instance]:
    return [Instance("loglikelihood", {"id": doc}, (context, choice), n) for n, choice in enumerate(choices)]


def whole(text: str) -> Instance:
    return Instance("loglikelihood_rolling", {}, (text,), 0)


# --- against the harness's own Hugging Face model ---


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    """A folder with a small Qwen3 and its tokenizer, and the same weights as an AR model of ours."""
    folder = tmp_path_factory.mktemp("qwen3")
    tokenizer = train_bpe([TEXT * 4], 290)
    tokenizer.save(folder)
    config = Qwen3Config(
        vocab_size=tokenizer.vocab_size, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=64,
        tie_word_embeddings=True, initializer_range=0.4,
    )  # fmt: skip
    torch.manual_seed(0)
    theirs = Qwen3ForCausalLM(config)
    theirs.save_pretrained(folder)
    ours = pretrained.taken(folder, vocab_size=tokenizer.vocab_size)
    with torch.no_grad():  # an import leaves BOS, PAD and MASK to training
        ours.embed_tokens.weight[-3:] = theirs.model.embed_tokens.weight[-3:]
    return folder, ours, tokenizer


def pair(qwen, **settings) -> tuple[HarnessModel, HFLM]:
    folder, ours, tokenizer = qwen
    theirs = HFLM(pretrained=str(folder), device="cpu", dtype="float32", batch_size=3, max_length=WINDOW)
    return HarnessModel((ours, tokenizer), batch_size=2, max_length=WINDOW, **settings), theirs


REQUESTS = [
    *question("the quick brown", " fox", " dog", " fox jumps over the lazy", "!"),
    *question("the quick ", "brown fox", "  brown"),  # spaces that belong to the continuation
    *question("", "the dog", " sleeps on"),
    *question(TEXT * 5, "the quick", " and the dog sleeps"),  # more context than the window
]


def same(ours: HarnessModel, theirs: HFLM) -> None:
    """The harness's model is asked one by one: together, it confuses continuations that end a text alike."""
    known = [theirs.loglikelihood([request], True)[0] for request in REQUESTS]
    scored = ours.loglikelihood(REQUESTS, True)
    assert [greedy for _, greedy in scored] == [greedy for _, greedy in known]
    assert [value for value, _ in scored] == pytest.approx([value for value, _ in known], abs=1e-4)


def test_ar_loglikelihoods_equal_the_harness_own_model_on_the_same_weights(qwen):
    ours, theirs = pair(qwen, add_bos_token=False)
    same(ours, theirs)
    assert ours.counts.cut_contexts == 2


def test_ar_loglikelihoods_with_bos_in_front_equal_the_harness_own_model(qwen, tmp_path):
    folder, model, tokenizer = qwen
    bos = tokenizer.backend.id_to_token(tokenizer.bos_id)
    added = Tokenizer.load(folder)
    added.backend.post_processor = TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, tokenizer.bos_id)])
    added.save(tmp_path)
    for file in ("config.json", "model.safetensors"):
        (tmp_path / file).symlink_to(folder / file)
    theirs = HFLM(pretrained=str(tmp_path), device="cpu", dtype="float32", max_length=WINDOW)
    assert theirs.tok_encode("the")[0] == tokenizer.bos_id
    ours = HarnessModel((model, tokenizer), max_length=WINDOW)
    same(ours, theirs)


def test_ar_rolling_loglikelihoods_equal_the_harness_own_model_over_several_windows(qwen):
    ours, theirs = pair(qwen)
    requests = [whole(text) for text in ("dog", TEXT, TEXT * 4)]
    assert ours.loglikelihood_rolling(requests, True) == pytest.approx(
        theirs.loglikelihood_rolling(requests, True), abs=1e-3
    )


# --- exactness ---


@pytest.mark.parametrize("kind", SAMPLE)
def test_one_token_answers_are_exact_and_their_probabilities_sum_to_one(kind):
    lm = adapter(kind)
    context = lm.tok_encode("once upon")
    answers = lm._loglikelihood_tokens([(("", ""), context, [token]) for token in range(257)])
    others = 0.0
    if kind == "ar":  # whose softmax has the specials in it
        others = float(lm.model(torch.tensor([context])).logits[0, -1].softmax(-1)[257:].sum().detach())
    assert math.fsum(math.exp(value) for value, _ in answers) + others == pytest.approx(1, abs=1e-9)
    assert all(value.stderr == 0 for value, _ in answers)
    assert sum(greedy for _, greedy in answers) == 1
    assert max(answers)[1]


@pytest.mark.parametrize("kind", ["mdlm", "paper"])
def test_short_answers_are_summed_over_all_mask_sets(kind):
    requests = question("so", " it")  # three tokens: at most seven mask sets
    value, _ = adapter(kind, samples=7).loglikelihood(requests, True)[0]
    other, _ = adapter(kind, samples=7, seed=1).loglikelihood(requests, True)[0]
    assert value.stderr == 0
    assert value == other


@pytest.mark.parametrize("kind", SAMPLE)
def test_an_indifferent_model_pays_the_same_for_every_token_however_a_text_is_cut(kind):
    model = tiny.model(kind, symbols=257)
    with torch.no_grad():
        model.embed_tokens.weight.zero_()
    lm = HarnessModel((model, byte_tokenizer()), samples=4, max_length=WINDOW)
    per_token = math.log(260 if kind == "ar" else 257)
    long = "x" * 100
    answers = lm.loglikelihood([*question("a", " bc"), *question("a" * 50, "bc"), *question("a", long)], True)
    assert [value for value, _ in answers] == pytest.approx([-3 * per_token, -2 * per_token, -100 * per_token])
    assert (lm.counts.cut_contexts, lm.counts.split_continuations) == (1, 1)
    rolled = lm.loglikelihood_rolling([whole(long), whole("x"), whole("")], True)
    assert rolled == pytest.approx([-100 * per_token, -per_token, 0])


@pytest.mark.parametrize("kind", ["mdlm", "bdlm", "paper", "causal"])
def test_greedy_means_what_one_forward_per_chunk_fills_in(kind):
    model = tiny.model(kind, scale=6)
    tokens = tiny.tokens(3, 9)
    prompt = torch.arange(9).expand(3, 9) < 3
    blank = tokens.masked_fill(~prompt, model.config.mask_id)
    filled, index = dcdm.generate(model, blank, temperature=0, commit="chunk").tokens, torch.arange(3)
    assert is_greedy(model, filled, prompt, index).all()
    filled[1, 5] = (filled[1, 5] + 1) % tiny.LETTERS
    assert is_greedy(model, filled, prompt, index).tolist() == [True, False, True]


# --- noise ---


def test_noise_follows_a_position_s_rank_among_those_that_may_be_masked():
    groups = torch.tensor([[0, 0, 1, 1, 1, 1, -1], [0, 0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 1, -1, -1]])  # 15 subsets
    for draw in sampled_subsets(Key(0), torch.tensor([5, 5, 5]), groups, 1, 4):
        rows = [draw.masked[row][groups[row] == 1].tolist() for row in range(3)]
        assert rows[0] == rows[1] == rows[2]


def test_the_choices_of_a_question_share_their_noise_and_questions_do_not(monkeypatch):
    drawn = []
    score = likelihood.score

    def spy(model, tokens, *rest, index, **more):
        drawn.extend(index.tolist())
        return score(model, tokens, *rest, index=index, **more)

    monkeypatch.setattr(likelihood, "score", spy)
    lm = adapter("mdlm")
    lm.loglikelihood(question("A", " one or two", " one or ten", doc=1), True)
    lm.loglikelihood(question("Before", " one or two", doc=1), True)
    lm.loglikelihood(question("A", " one or two", doc=2), True)
    assert drawn[0] == drawn[1] == drawn[2] != drawn[3]
    bare = [Instance("loglikelihood", {}, (context, " some words"), 0) for context in ("one", "one", "ten")]
    a, b, c = (value for value, _ in lm.loglikelihood(bare, True))  # without a document by their context
    assert a == b != c
    assert a.stderr > 0
    assert adapter("mdlm", seed=1).loglikelihood(bare[:1], True)[0][0] != a


@pytest.mark.parametrize("kind", ["mdlm", "paper"])
def test_neither_batch_size_nor_order_changes_a_score(kind):
    requests = [*question("who", " me", " you and I", " nobody at all", doc=1), *question("what", " it is", doc=2)]
    one = adapter(kind, batch_size=1).loglikelihood(requests, True)
    many = adapter(kind, batch_size=8).loglikelihood(requests[::-1], True)[::-1]
    assert [value for value, _ in one] == pytest.approx([value for value, _ in many], abs=1e-9)
    assert [value.stderr for value, _ in one] == pytest.approx([value.stderr for value, _ in many], abs=1e-9)


# --- the harness's services ---


@pytest.mark.slow
def test_importing_dcdm_loads_no_library_and_the_harness_model_registers_itself():
    code = "import dcdm, sys; assert 'torch' not in sys.modules and 'lm_eval' not in sys.modules\n"
    code += "import dcdm.evaluation.harness\n"
    code += "from lm_eval.api.registry import get_model; assert get_model('dcdm').__name__ == 'HarnessModel'\n"
    code += "assert get_model('hf').__name__ == 'HFLM'"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.slow
def test_the_harness_own_command_line_runs_the_model(tmp_path):
    model = tiny.model("causal", symbols=257).float()
    save_file(
        {f"model.{name}": value for name, value in model.state_dict().items()}, tmp_path / "model.safetensors"
    )
    (tmp_path / "config.json").write_text(json.dumps({"dcdm": model.config.to_dict()}))
    byte_tokenizer().save(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"q": "Is it?", "choices": ["yes", "no"], "answer": 0}\n' * 2)
    (tmp_path / "task.yaml").write_text(
        "task: ours\noutput_type: multiple_choice\nvalidation_split: train\ndataset_path: json\n"
        f"dataset_kwargs: {{data_files: {tmp_path / 'rows.jsonl'}}}\n"
        "doc_to_text: '{{q}}'\ndoc_to_target: answer\ndoc_to_choice: '{{choices}}'\n"
        "metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]\n"
    )
    arguments = ["--model", "dcdm", "--model_args", f"pretrained={tmp_path},samples=4", "--tasks", "ours"]
    arguments += ["--include_path", str(tmp_path), "--output_path", str(tmp_path / "out")]
    command = [sys.executable, "-m", "dcdm.evaluation", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (written,) = (tmp_path / "out").rglob("*.json")
    config = json.loads(written.read_text())["config"]
    assert config["estimator_label"] == "upper bound (NELBO)"
    assert config["requests"] == 4


def test_cached_answers_keep_their_monte_carlo_error_and_the_harness_is_told_of_it(tmp_path):
    requests, lm = question("who", " me", " nobody at all"), adapter()
    first = CachingLM(lm, str(tmp_path / "answers.db")).loglikelihood(requests)
    assert lm.get_model_info()["estimator_label"] == "upper bound (NELBO)"
    assert lm.get_model_info()["stderr_max"] == first[1][0].stderr
    again = adapter()
    again._score = None  # must not be asked
    second = CachingLM(again, str(tmp_path / "answers.db")).loglikelihood(requests)
    assert second == first
    assert [value.stderr for value, _ in second] == [value.stderr for value, _ in first]
    assert isinstance(second[1][0], Estimate)
    assert second[1][0].stderr > 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"estimator": "exact"}, "does not fit MDLM"),
        ({"samples": 1}, "samples=1"),
        ({"add_bos_token": False}, "add_bos_token"),
        ({"batch_size": "many"}, "batch_size"),
        ({"colour": "red"}, "colour"),
        ({"commit": "all-at-once"}, "commit"),
        ({"routing": "nowhere"}, "routing"),
    ],
)
def test_wrong_settings_are_refused_by_name(settings, message):
    with pytest.raises(ConfigError, match=message):
        adapter("mdlm", **settings)


# --- generation ---


class Echo:
    """Stands in for `dcdm.generate`: completes every prompt by its own last letters and a stop word."""

    def __init__(self) -> None:
        self.calls: list[dict] = []

    def __call__(self, model, prompts, *, max_new_tokens, stop, index, **settings):
        self.calls.append({"prompts": prompts, "length": max_new_tokens, "index": index, **settings})
        text = byte_tokenizer()
        completions = [[*prompt[-2:], *text.encode("STOP and more")] for prompt in prompts]
        assert stop(0, completions[0])
        assert not stop(0, completions[0][:2])
        return type("Generation", (), {"completions": completions})


def asked(context: str, **settings) -> Instance:
    return Instance("generate_until", {}, (context, {"until": ["STOP"], **settings}), 0)


def test_generation_keeps_the_order_cuts_at_stop_words_and_shortens_what_does_not_fit(monkeypatch):
    echo = Echo()
    monkeypatch.setattr("dcdm.evaluation.harness.generate", echo)
    lm = adapter(batch_size=2)
    requests = [asked("ab"), asked("abcdef" * 9, max_gen_toks=8), asked("xyz"), asked("long" * 20)]
    assert lm.generate_until(requests, True) == ["ab", "ef", "yz", "ng"]
    assert lm.counts.windowed_generations == 3  # 256 tokens do not fit beside a prompt, 8 do
    assert lm.counts.cut_contexts == 2
    for call in echo.calls:
        assert call["decoding"].temperature == 0
        assert all(prompt[0] == lm.text.bos_id for prompt in call["prompts"])
        assert all(len(prompt) + min(call["length"], WINDOW // 2) <= WINDOW for prompt in call["prompts"])


def test_repeated_requests_are_sampled_with_numbers_of_their_own(monkeypatch):
    echo = Echo()
    monkeypatch.setattr("dcdm.evaluation.harness.generate", echo)
    request = asked("ab", do_sample=True, temperature=0.7, top_p=0.9)
    adapter().generate_until([request, request], True)
    assert len(set(echo.calls[0]["index"])) == 2
    assert (echo.calls[0]["decoding"].temperature, echo.calls[0]["decoding"].top_p) == (0.7, 0.9)


@pytest.mark.parametrize("kind", ["ar", "causal"])
def test_generation_by_the_model_itself_does_not_depend_on_the_batch(kind):
    lengths = {"ab": 6, "abcdef" * 9: 30, "xyz": 6}
    requests = [asked(text, max_gen_toks=n, do_sample=True, temperature=1.0) for text, n in lengths.items()]
    one, many = (adapter(kind, scale=1, batch_size=size).generate_until(requests, True) for size in (1, 3))
    assert one == many
    assert len(set(one)) == 3
