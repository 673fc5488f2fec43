import pytest

from dcdm.viewing.chunks import KINDS, counted, kinds_of


def by_byte(text: str) -> list[str]:
    return kinds_of([bytes([byte]) for byte in text.encode()])


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("def", "keyword"), ("None", "keyword"), ("define", "name"), ("_x1", "name"), ("été", "name"),
        ("中文", "name"),
        ("42", "digits"), ("0x1F", "digits"), ("3.14", "digits"), ("1_000", "digits"), (" \t\n", "whitespace"),
        ("):", "punctuation"), ("—„", "punctuation"), ("→", "other"), ("🙂", "other"),
    ],
)  # fmt: skip
def test_every_byte_of_a_word_has_the_kind_of_the_word(text, kind):
    assert by_byte(text) == [kind] * len(text.encode())


def test_a_line_of_code_falls_into_its_parts():
    line = [
        ("if", "keyword"), (" ", "whitespace"), ("x1", "name"), (">=", "punctuation"), ("2.5", "digits"),
        (":", "punctuation"),
    ]  # fmt: skip
    assert by_byte("".join(part for part, _ in line)) == [kind for part, kind in line for _ in part]


def test_a_token_goes_with_the_word_it_lies_in_and_leading_space_does_not_count():
    assert kinds_of([b"ret", b"urn", b" in", b"put", b":\n", b"  "]) == [
        "keyword", "keyword", "name", "name", "punctuation", "whitespace",
    ]  # fmt: skip


def test_broken_letters_and_tokens_without_text_are_other():
    assert kinds_of([b"", b"\xa9", b"a", "é".encode()[:1]]) == ["other", "other", "name", "other"]


def test_counting_leaves_out_what_is_in_no_chunk():
    table = counted([0, 1, 2, 2, -1], ["other", "name", "name", "digits", "name"], 3)
    assert [dict(zip(KINDS, row, strict=True))["name"] for row in table] == [1, 1, 0]
    assert sum(map(sum, table)) == 3
