"""The pages of the site say what the package does: their commands, code and computed tables."""

from __future__ import annotations

import ast
import doctest
import importlib
import importlib.util
import re
import shlex
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from typer.main import get_command

from lopsided.cli.app import app
from lopsided.recipe import find_recipe, is_word, named_recipes, read_words

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [
    ROOT / "README.md",
    *sorted(DOCS.glob("*.md")),
    *sorted(DOCS.glob("howto/*.md")),
    *sorted(DOCS.glob("understand/*.md")),
]
CODE = [page for page in PAGES if "```pycon" in page.read_text("utf-8")]


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def shell_lines(text: str) -> Iterator[str]:
    """The lines of blocks without a language or with that of the shell, continued lines as one."""
    language = None
    for line in text.replace("\\\n", " ").splitlines():
        if line.strip().startswith("```"):
            language = line.strip(" `") if language is None else None
        elif language in ("", "sh"):
            yield line


def commands() -> list[tuple[str, list[str]]]:
    """Each command of lopsided on the pages, as the words after ``lopsided``."""
    found = []
    for page in PAGES:
        for line in shell_lines(page.read_text(encoding="utf-8")):
            words = shlex.split(line, comments=True) if re.match(r"\s*(lopsided|torchrun) ", line) else []
            if "lopsided" in words:
                found.append((page.name, words[words.index("lopsided") + 1 :]))
    return found


WORDY = ("fit", "compare")
"""The verbs that set fields of a recipe by words and by options without a help of their own."""


def options() -> dict[str, set[str]]:
    """The options of each verb, as the command itself parses them."""
    verbs: dict[str, Any] = getattr(get_command(app), "commands")  # noqa: B009 (typer's type does not tell of it)
    return {
        name: {option for parameter in verb.params for option in parameter.opts if option.startswith("-")} | {"--help"}
        for name, verb in verbs.items()
    }


def is_field(option: str) -> bool:
    """Whether an option is the last part of the name of a field: --group-from is data.group_from."""
    name = option.removeprefix("--").replace("-", "_")
    return name in {path.rpartition(".")[2] for path, _, _ in find_recipe("quick").leaves()}


def test_every_command_on_a_page_has_a_verb_options_fields_recipes_that_exist() -> None:
    known, wrong = options(), []
    found = [(page, words) for page, words in commands() if words]
    assert len(found) > 50
    for page, (verb, *words) in found:
        if verb not in known:
            wrong.append((page, verb))
            continue
        wrong += [
            (page, word)
            for word in words
            if word.startswith("--") and word not in known[verb] and not (verb in WORDY and is_field(word))
        ]
        given = dict(pairwise(words))
        recipe = given.get("--recipe", "from-scratch")
        if recipe not in named_recipes():
            continue
        settings = [word for word in words if verb in WORDY and is_word(word)]
        settings = [word for word in settings if "--auto" not in words or not word.startswith("minutes=")]
        loss = [f"loss={given['--loss']}"] if "--loss" in given else []
        base = find_recipe(recipe)
        fields = {path for path, _, _ in base.leaves()} | {"classifier.loss", "encoder_training.loss"}
        read = read_words([*settings, *loss], recipe=lambda base=base: base).values
        wrong += [(page, path) for path in read if path not in fields and ".loss." not in path]
    assert wrong == []


@pytest.mark.parametrize(
    "page", [page for page in PAGES if "```pycon" in page.read_text("utf-8")], ids=lambda p: p.stem
)
def test_the_code_of_a_page_prints_what_the_page_shows(page: Path) -> None:
    failed, tried = doctest.testfile(str(page), module_relative=False, encoding="utf-8")
    assert tried
    assert not failed


def test_the_examples_import_what_there_is() -> None:
    wanted = [
        (node.module, alias.name)
        for path in sorted((ROOT / "examples").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("lopsided")
        for alias in node.names
    ]
    assert len(wanted) > 10
    assert [(room, name) for room, name in wanted if not hasattr(importlib.import_module(room), name)] == []


def test_the_first_page_shows_each_command_with_its_output() -> None:
    page = (ROOT / "docs" / "start.md").read_text(encoding="utf-8")
    texts = sorted((ROOT / "docs" / "figures").glob("start_*.txt"))
    assert len(texts) >= 7
    for text in texts:
        _, block = page.split(f"<!-- figures/{text.name} -->\n", 1)
        assert block.partition("\n")[2].startswith(text.read_text(encoding="utf-8") + "```"), text.name


def test_the_tables_of_the_page_on_numbers_of_images_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["site_figures.py", "--check"])
    assert load(ROOT / "scripts" / "site_figures.py").main() == 0


def test_the_check_of_the_site_names_lost_links_lost_anchors_and_files_of_other_hosts(tmp_path: Path) -> None:
    (tmp_path / "one.html").write_text(
        '<h1 id="top">1</h1><a href="two.html#there">ok</a><a href="two.html#lost">-</a><a href="three.html">-</a>'
        '<a href="https://example.org/">ok</a><img src="https://example.org/a.png"><a href="#top">ok</a>'
    )
    (tmp_path / "two.html").write_text('<p id="there">2</p><link rel="canonical" href="https://example.org/two">')
    (tmp_path / "a.css").write_text("p { background: url(https://example.org/b.png) }")
    found = load(ROOT / "scripts" / "check_site.py").problems(tmp_path)
    assert [re.findall(r"lost|three|a\.png|a\.css", line)[0] for line in found] == ["lost", "three", "a.png", "a.css"]
