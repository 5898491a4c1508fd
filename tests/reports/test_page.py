from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from markupsafe import Markup

from lopsided.reports import svg
from lopsided.reports.page import embedded_json, packed
from lopsided.reports.run_page import run_page
from made_runs import make_run


@given(st.dictionaries(st.text(), st.text() | st.floats(allow_nan=False, allow_infinity=False)))
def test_embedded_json_reads_back_and_cannot_end_its_element(data: dict[str, object]) -> None:
    text = str(embedded_json(data))
    assert json.loads(text) == data
    assert not set("<>&\u2028\u2029") & set(text)


def test_an_array_is_packed_little_end_first() -> None:
    assert packed(np.array([1.5, -2.0], dtype=">f4")) == base64.b64encode(b"\0\0\xc0\x3f\0\0\0\xc0").decode()


@given(st.text())
def test_a_figure_escapes_every_text(text: str) -> None:
    plot = svg.Plot(text, (0, 1), (0, 1), x_label=text, y_label=text, x_ticks=[0.0], x_names=[text])
    plot.dot(0.5, 0.5, "dot", text)
    plot.rule(y=0.5, text=text)
    plot.diamond(0.1, 0.1, "chosen", text)
    drawn = plot.render()
    assert isinstance(drawn, Markup)
    without = svg.Plot("", (0, 1), (0, 1), x_label="x", y_label="y", x_ticks=[0.0], x_names=["x"])
    without.dot(0.5, 0.5, "dot", "x")
    without.rule(y=0.5, text="x")
    without.diamond(0.1, 0.1, "chosen", "x")
    if text:
        assert drawn.count("<") == without.render().count("<")


class _Elements(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def test_a_page_holds_all_it_needs_and_allows_nothing_else(tmp_path: Path) -> None:
    page = run_page(make_run(tmp_path / "run"))
    parser = _Elements()
    parser.feed(page)
    policy = next(a["content"] or "" for tag, a in parser.found if a.get("http-equiv") == "Content-Security-Policy")
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    assert rules["img-src"] == "data:"
    for tag, directive in (("script", "script-src"), ("style", "style-src")):
        bodies = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        hashes = {f"'sha256-{base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()}'" for body in bodies}
        assert set(rules[directive].split()) == hashes
    for _, attributes in parser.found:
        assert "style" not in attributes
        assert not [name for name in attributes if name.startswith("on")]
        for name in ("src", "href"):
            assert (attributes.get(name) or "#").startswith(("#", "data:"))
    identities = [attributes["id"] for _, attributes in parser.found if "id" in attributes]
    assert len(identities) == len(set(identities))


def test_each_word_of_a_label_and_of_a_description_leads_to_an_element(tmp_path: Path) -> None:
    parser = _Elements()
    parser.feed(run_page(make_run(tmp_path / "run")))
    identities = {attributes.get("id") for _, attributes in parser.found}
    for _, attributes in parser.found:
        for name in ("for", "aria-describedby", "aria-labelledby"):
            assert set((attributes.get(name) or "").split()) <= identities
        if (attributes.get("href") or "").startswith("#"):
            assert (attributes["href"] or "")[1:] in identities
