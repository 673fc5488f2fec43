"""Chat templates: rendered as `transformers` does, in its sandbox."""

from __future__ import annotations

import pytest

from dcdm.config import DataConfig
from dcdm.data.chats import ChatError, ChatTemplate, ExampleMaker
from dcdm.data.sources import BadRow
from dcdm.data.tokenizers import Tokenizer, byte_tokenizer

BYTES = byte_tokenizer()
CHAT = [{"role": "user", "content": "<b>1+1?</b> ä\n"}, {"role": "assistant", "content": "2 🙂"}]


def template(text: str) -> ChatTemplate:
    return ChatTemplate(Tokenizer(BYTES.backend, BYTES.eos_id, text))


FAMILIAR = {
    "plain": "{% for m in messages %}{{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}A:{% endif %}",
    "trimmed": "{%- for m in messages -%}\n  {% if loop.first %}\n [{{ m.role }}]\n  {% endif %}\n{%- endfor %}",
    "tokens": "{{ bos_token }}|{{ eos_token }}|{{ pad_token }}|{{ tools }}|{{ documents is none }}",
    "json": "{{ messages | tojson }}{{ messages[0] | tojson(indent=2, sort_keys=true) }}",
    "namespace": "{% set n = namespace(k=0) %}{% for m in messages %}{% set n.k = n.k + 1 %}{% endfor %}{{ n.k }}",
    "loops": "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
    "generation": "{% for m in messages %}{% generation %}{% set x = 1 %}x{% endgeneration %}{{ x }}{% endfor %}",
    "macro": "{% macro say(m) %}<{{ m.role }}>{% endmacro %}{% for m in messages %}{{ say(m) }}{% endfor %}",
    "methods": "{{ messages[0].content.split('+')[0] }}{{ dict(a=1).items() | list }}{{ messages[1:] | length }}",
    "year": "{{ strftime_now('%Y') }}",
}


@pytest.mark.parametrize("name", FAMILIAR)
def test_templates_give_what_transformers_gives(name):
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast(
        tokenizer_object=BYTES.backend, eos_token=BYTES.eos_token, chat_template=FAMILIAR[name]
    )
    made = template(FAMILIAR[name])
    for answering in (True, False):
        expected = theirs.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=answering, bos_token="")
        assert made.render(CHAT, answering=answering) == expected


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{% if %}", "Expected an expression"),
        ("a \ud800 {{ 'b' }}", "surrogates not allowed"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
    ],
)
def test_a_template_that_fails_is_refused_with_the_reason(text, said):
    with pytest.raises(ChatError, match=f"refuses it: .*{said}"):
        template(text).render(CHAT, answering=True)


@pytest.mark.parametrize(
    "text",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ raise_exception.__globals__.json }}",
        "{{ messages.append(1) }}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_a_template_stays_in_its_sandbox(text):
    with pytest.raises(ChatError, match="refuses it"):
        template(text).render(CHAT, answering=True)


def test_a_row_that_the_template_refuses_is_a_bad_row():
    tokenizer = Tokenizer(BYTES.backend, BYTES.eos_id, "{{ raise_exception('no users') }}")
    with pytest.raises(BadRow, match="refuses it: no users"):
        ExampleMaker(DataConfig(messages_field="m"), tokenizer).examples_of({"m": CHAT})
