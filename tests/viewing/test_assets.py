"""Scripts that reports and the playground share: modules there, one plain script here."""

from __future__ import annotations

import re

from dcdm.viewing.pages import ASSETS, page


def made() -> str:
    return page("<b>a page</b>", {"evil": "</script><img src=x>"})


def test_a_page_asks_for_nothing_from_outside_and_shows_text_as_text():
    text = made()
    assert not re.search(r"https?:|//[a-z]+\.|@import|url\(|\bfetch\(|XMLHttpRequest|<link|<img|<b>", text)
    assert "default-src 'none'" in text
    assert text.count("</script>") == 2


def test_a_page_holds_every_module_once_behind_those_that_it_imports():
    script = re.findall(r"(?s)<script>(.*?)</script>", made())[0]
    assert not re.search(r"^(import|export)\b", script, re.MULTILINE)
    names = re.findall(r"^(?:async )?(?:const|let|function|class) (\w+)", script, re.MULTILINE)
    assert {"make", "TokenCells", "data"} <= set(names)
    assert len(names) == len(set(names))
    order = ["const byId", "class TokenCells", "class ChunkText"]
    assert sorted(order, key=script.index) == order
    assert script.index("const data") < script.index("data.")


def test_every_import_names_what_the_module_exports():
    scripts = {file.name: file.read_text() for file in ASSETS.iterdir() if file.name.endswith(".js")}
    for name, text in scripts.items():
        for names, source in re.findall(r'^import \{([^}]*)\} from "\./([\w.]+)";', text, re.MULTILINE):
            for imported in names.split(","):
                exported = rf"^export (?:const|function|class) {imported.strip()}\b"
                assert re.search(exported, scripts[source], re.MULTILINE), (name, imported)
