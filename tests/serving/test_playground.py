"""The playground's files, as far as they can be judged without a browser (test_browser.py has one)."""

from __future__ import annotations

import re

import pytest

from dcdm.serving.app import INDEX, load_assets
from dcdm.viewing import palette

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


def test_the_page_needs_no_inline_script_or_style():
    index = ASSETS[INDEX]
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*src=)", index)


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_are_short_and_never_read_text_as_markup(name):
    text = ASSETS[name]
    assert text.count("\n") < 400
    assert not re.search(r"(inner|outer|Adjacent)HTML|document\.write|\beval\(|Function\(|Attribute\(.style", text)


def test_every_id_that_scripts_ask_for_is_in_the_page_once():
    ids = re.findall(r'\bid="([^"]+)"', ASSETS[INDEX])
    assert len(ids) == len(set(ids))
    asked = {found for name in SCRIPTS for found in re.findall(r'byId\("([^"]+)"\)', ASSETS[name])}
    assert asked <= set(ids)


def test_chunks_have_the_packages_colours():
    for chunk in range(9):
        assert f".chunk-{chunk} {{ --chunk: {palette.colour(chunk)};" in ASSETS["palette.css"]
