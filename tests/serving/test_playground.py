"""The playground's files, as far as they can be judged without a browser (test_browser.py has one)."""

from __future__ import annotations

import re

import pytest

from dcdm.serving.app import INDEX, load_assets

ASSETS = {name: content.decode() for name, (content, _) in load_assets().items()}
SCRIPTS = sorted(name for name in ASSETS if name.endswith(".js"))


def test_everything_that_is_asked_for_is_there_and_comes_from_the_server_itself():
    index = ASSETS[INDEX]
    asked = re.findall(r'(?:href|src)="([^"#]+)"', index)
    assert asked
    assert all(address.removeprefix("/assets/") in ASSETS for address in asked)
    for name in SCRIPTS:
        imported = re.findall(r'from "(.+?)"', ASSETS[name])
        assert all(address.removeprefix("./") in ASSETS for address in imported), name
    for name, text in ASSETS.items():
        outside = re.findall(r"https?://[^\s\"'`]+", text.replace("http://www.w3.org/2000/svg", ""))
        assert outside == [], name
        assert "@import" not in text
        assert not re.search(r"\burl\(", text)


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_never_read_text_as_markup(name):
    text = ASSETS[name]
    assert not re.search(r"(inner|outer|Adjacent)HTML|document\.write|\beval\(|Function\(|Attribute\(.style", text)
