"""Rebuild every table and figure of the docs from the committed records and answers, or check that none differs.

    python studies/rebuild.py             # write docs/*.md and docs/figures/*.svg anew
    python studies/rebuild.py --check     # write nothing; name what differs, and exit with 1 if anything does

A table stands between ``<!-- name -->`` and ``<!-- end name -->``. ``TABLES`` says where it comes from, and
studies/page_tables.py has those of one JSON record; a mark without an entry, or one that stands twice, is an error, so
that no table is without its source. docs/paper-tables.md and docs/understand/how-many-images.md have marks of their own
(scripts/results.py, scripts/site_figures.py), which this command renews as well. Figures are compared without the
version of matplotlib that drew them; an SVG file that nothing draws is named, too. Screenshots are not compared.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import re
import runpy
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import page_tables
import shared
from lopsided import files

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
MARK = re.compile(r"<!-- (?!end)([\w-]+) -->\n(?=\||<!-- end)")


def printed(script: str, *words: str) -> str:
    """Return what a script of this folder prints."""
    before, sys.argv = sys.argv, [script, *words]
    try:
        with contextlib.redirect_stdout(io.StringIO()) as text:
            runpy.run_path(str(ROOT / "studies" / script), run_name="__main__")
    finally:
        sys.argv = before
    return text.getvalue().strip("\n")


def decisions(study: str) -> str:
    """Return a table of docs/decisions.md."""
    module: Any = importlib.import_module("decisions")
    lines = [line for line in shared.read(shared.RECORDS / "decisions.jsonl") if line["study"] == study]
    return str((module.rules_table if study == "rules" else module.epochs_table)(lines)).strip("\n")


def evidence(name: str) -> str:
    """Return a table of docs/recipe-tables.md."""
    module: Any = importlib.import_module("evidence")
    return str(module.BLOCKS[name]())


TABLES: dict[str, dict[str, Callable[[], str]]] = {
    "decisions.md": {"rules": partial(decisions, "rules"), "epochs": partial(decisions, "epochs")},
    "encoder-tables.md": {
        "gains": partial(printed, "pixels.py", "gains"),
        "pixels": partial(printed, "pixels.py", "summary"),
        "layers": partial(printed, "layers.py", "summary"),
        "heads": partial(printed, "layers.py", "heads"),
        "weights": partial(printed, "weights.py", "table"),
        "regression": partial(printed, "regression.py", "summary"),
        "summary": partial(printed, "frozen.py", "summary"),
        "adapters": partial(printed, "adapters.py", "summary"),
        "fine-tune": partial(printed, "fine_tune.py", "summary"),
    },
    "few.md": {
        "few": partial(printed, "few.py", "auroc"),
        "few-recall": partial(printed, "few.py", "recall"),
        "few-balanced": partial(printed, "few.py", "balanced"),
        "story": partial(printed, "story.py", "table"),
        "few-local": partial(printed, "few.py", "local"),
        "few-aligned": partial(printed, "few.py", "aligned"),
    },
    "trust.md": {"false-alarms": partial(printed, "false_alarms.py", "summary")},
    "views.md": {"views": partial(printed, "views.py", "summary")},
    "recipe-tables.md": {
        name: partial(evidence, name)
        for name in ("short", "against", "study", "methods", "eta", "isic", "blend", "lesions", "all")
    },
    "why-acl.md": {
        "push": partial(printed, "push.py", "table"),
        "forces": partial(printed, "push.py", "forces"),
    },
    **{page: {"peers-short": partial(printed, "peers.py", "short")} for page in ("README.md", "which-recipe.md")},
    "peers.md": {
        "peers-short": partial(printed, "peers.py", "short"),
        "peers": partial(printed, "peers.py", "table"),
        "scratch": partial(printed, "peers.py", "scratch"),
    },
    "registered.md": {
        "registered": partial(printed, "registered.py", "table"),
        "predictions": partial(printed, "registered.py", "predictions"),
        "seven": partial(printed, "fine_tune.py", "seven-table"),
        "seven-folds": partial(printed, "fine_tune.py", "seven-folds"),
        "seven-choices": partial(printed, "fine_tune.py", "seven-choices"),
        "seven-course": partial(printed, "fine_tune.py", "seven-course"),
        "sources": partial(printed, "registered.py", "sources"),
        "classes": partial(printed, "registered.py", "classes"),
    },
}
"""The tables of each page, by the names of their marks."""


def marks(page: str) -> list[str]:
    """Return the names of the tables that a page marks."""
    return MARK.findall(page)


def with_table(page: str, name: str, table: str) -> str:
    """Return a page with one table exchanged."""
    before, found, rest = page.partition(f"<!-- {name} -->\n")
    end = f"<!-- end {name} -->"
    if not found or end not in rest:
        raise SystemExit(f"The table {name} has no <!-- {name} --> or no {end}.")
    return f"{before}{found}{table}\n{end}{rest.partition(end)[2]}"


def pages() -> Iterator[tuple[Path, str]]:
    """Yield each page with tables, and its text with all tables computed anew."""
    results, site = (script(name) for name in ("results", "site_figures"))
    for path in [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]:
        if path == site.PAGE:
            continue
        name = path.name if path.parent == ROOT else path.relative_to(DOCS).as_posix()
        text = path.read_text(encoding="utf-8")
        known = {**TABLES.get(name, {}), **page_tables.PAGES.get(name, {})}
        named = marks(text)
        if unknown := [mark for mark in named if mark not in known]:
            raise SystemExit(f"docs/{name}: nothing computes the table {', '.join(unknown)}. Add it to TABLES.")
        if twice := sorted({mark for mark in named if named.count(mark) > 1}):
            raise SystemExit(f"docs/{name} has the table {', '.join(twice)} twice.")
        if missing := [mark for mark in known if mark not in named]:
            raise SystemExit(f"docs/{name} has no place for the table {', '.join(missing)}.")
        for mark in named:
            text = with_table(text, mark, known[mark]())
        if known:
            yield path, text
    yield results.PAGE, results.renewed(results.PAGE.read_text(encoding="utf-8"))
    yield site.PAGE, site.with_tables(site.PAGE.read_text(encoding="utf-8"))


def script(name: str, folder: str = "scripts") -> ModuleType:
    """Import a script of a folder that is no package."""
    spec = importlib.util.spec_from_file_location(f"{folder}_{name}", ROOT / folder / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # Where dataclasses look for the names in annotations.
    spec.loader.exec_module(module)
    return module


def draw_figures(folder: Path) -> None:
    """Draw every figure of the docs that comes from records or formulas."""
    import matplotlib as mpl

    from lopsided.paper.figures import write_figures

    mpl.use("agg")
    modules: Any = importlib.import_module("evidence"), importlib.import_module("entropy_along_training")
    results, site = (script(name) for name in ("results", "site_figures"))
    modules[0].draw_figure(folder / "costs.svg")
    with mpl.rc_context():
        modules[1].draw_figure(shared.read_json(modules[1].RECORD), folder / "entropy_along_training.svg")
    with mpl.rc_context():
        script("lonely_anchor", "examples").draw(folder / "lonely_anchor.svg")
    results.draw_claims(folder / "claims.svg")
    site.draw_intervals(folder / "how_many_images.svg")
    site.draw_eta_gamma(folder / "eta_gamma.svg")
    for part in results.PARTS:
        if part.figures and part.has_records:
            write_figures(part.comparison(), folder / "results", part.name, formats=("svg",))


def plain(figure: Path) -> str:
    """Return a figure without the version that drew it."""
    return re.sub(r"Matplotlib v[\d.]+, ", "", figure.read_text(encoding="utf-8")) if figure.exists() else ""


def main() -> int:
    """Write everything anew, or say what differs."""
    parser = shared.parser(__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, and exit with 1 if anything differs")
    parser.add_argument("--no-figures", action="store_true", help="tables only")
    given = parser.parse_args()
    different: list[Path] = []
    lost: list[Path] = []
    for path, text in pages():
        if path.read_text(encoding="utf-8") != text:
            different.append(path)
            if not given.check:
                files.atomic_write(path, text)
    if not given.no_figures:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "results").mkdir()
            draw_figures(folder)
            names = {drawn.relative_to(folder) for drawn in folder.rglob("*.svg")}
            lost = [path for path in sorted((DOCS / "figures").rglob("*.svg"))
                    if path.relative_to(DOCS / "figures") not in names]  # fmt: skip
            for path in sorted(DOCS / "figures" / name for name in names):
                drawn = folder / path.relative_to(DOCS / "figures")
                if plain(drawn) != plain(path):
                    different.append(path)
                    if not given.check:
                        files.atomic_write(path, drawn.read_text(encoding="utf-8"))
    for path in different:
        print(f"{path.relative_to(ROOT)} {'differs from its records' if given.check else 'is written anew'}.")
    for path in lost:
        print(f"{path.relative_to(ROOT)} is drawn by nothing.")
    return int(bool(lost) or (given.check and bool(different)))


if __name__ == "__main__":
    sys.exit(main())
