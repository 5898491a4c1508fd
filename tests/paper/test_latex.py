from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from lopsided.paper.compare import Comparison, Protocol, compare
from lopsided.paper.latex import escape, to_latex
from lopsided.paper.protocol import CL, Setting, base_recipe
from synthetic_records import make_records


def of(table: str, **more: object) -> Comparison:
    records = make_records(table, **more)  # type: ignore[arg-type]
    return compare(records, table, Protocol.of(base_recipe(table)))


@pytest.fixture(scope="module", params=["eta", "gamma", "isic", "losses", "holes", "others"])
def text(request: pytest.FixtureRequest) -> str:
    if request.param == "losses":
        settings = [CL, Setting(300.0, 7.0)]
        records = make_records("eta", settings=settings, runs=2, scenarios=["50:50"])
        return to_latex(compare(records, "eta", Protocol.of(base_recipe("eta")), settings=settings), "losses")
    if request.param == "others":
        tables = (
            compare(make_records(table, source="my_photos"), table, Protocol.of(base_recipe(table)))
            for table in ("eta", "isic")
        )
        return "".join(to_latex(table, "mine") for table in tables)
    if request.param == "holes":
        records = [r for r in make_records("gamma", runs=1) if (r.scenario, Setting.of(r)) != ("55:45", Setting(0, 4))]
        return to_latex(compare(records, "gamma", Protocol.of(base_recipe("gamma"))), "gamma")
    return to_latex(of(request.param), request.param)


def columns(row: str) -> int:
    """Count the columns that a row of a tabular fills."""
    spans = sum(int(number) - 1 for number in re.findall(r"\\multicolumn\{(\d+)\}", row))
    return len(re.findall(r"(?<!\\)&", row)) + 1 + spans


def test_braces_and_environments_are_balanced(text: str) -> None:
    plain = re.sub(r"\\[{}]", "", text)
    depth = 0
    for character in plain:
        depth += (character == "{") - (character == "}")
        assert depth >= 0
    assert depth == 0
    stack = []
    for kind, name in re.findall(r"\\(begin|end)\{([\w*]+)\}", text):
        if kind == "begin":
            stack.append(name)
        else:
            assert stack.pop() == name
    assert stack == []
    assert text.count("$") % 2 == 0


def test_every_row_fills_the_columns_that_the_tabular_has(text: str) -> None:
    for spec, body in re.findall(r"\\begin\{tabular\}\{(\w+)\}\n(.*?)\\end\{tabular\}", text, flags=re.DOTALL):
        rows = [line for line in body.splitlines() if line.rstrip().endswith(r"\\")]
        assert rows
        assert {columns(row) for row in rows} == {len(spec)}


def test_rules_are_those_of_booktabs(text: str) -> None:
    assert text.count(r"\toprule") == text.count(r"\bottomrule") == text.count(r"\begin{tabular}") > 0
    assert text.count(r"\midrule") >= text.count(r"\toprule")
    assert r"\hline" not in text


def test_there_is_a_table_for_each_set_of_images_and_over_scenarios_for_each_figure() -> None:
    labels = [f"tab:eta-{split}-{figure}" for split in ("test", "held-out") for figure in ("accuracy", "uwa")]
    assert re.findall(r"\\label\{(.*?)\}", to_latex(of("eta", runs=2), "eta")) == labels
    assert re.findall(r"\\label\{(.*?)\}", to_latex(of("isic", runs=2), "isic")) == ["tab:isic-test"]


def test_the_table_has_the_papers_shape() -> None:
    lines = [line.strip() for line in to_latex(of("eta"), "eta").splitlines()]
    at = lines.index(r"&  & \multicolumn{6}{c}{$\eta$} \\")
    assert lines[at + 1 : at + 3] == [r"\cmidrule{3-8}", r"Scenario & Metric & 0 & 60 & 120 & 180 & 240 & 300 \\"]
    accuracy, uwa = (
        next(i for i, line in enumerate(lines) if line.startswith(f"90:10 & {word} & $"))
        for word in ("Accuracy", "UWA")
    )
    assert lines[accuracy + 1] == r"& \textit{published} & 90.83 & 91.00 & 90.83 & 90.67 & 89.50 & 91.67 \\"
    assert lines[uwa + 1] == r"& \textit{published} & 64.91 & 68.61 & 66.11 & 64.02 & 61.77 & 72.58 \\"


def test_a_table_of_other_data_has_no_published_figures() -> None:
    for table in ("eta", "isic"):
        comparison = compare(make_records(table, source="my_photos"), table, Protocol.of(base_recipe(table)))
        text = to_latex(comparison, "mine")
        assert r"my\_photos " in text
        assert "published" not in text


def test_bold_is_what_differs_from_cl_and_not_what_is_highest() -> None:
    comparison = of("isic", effect=lambda c, s: -20.0 * (s.gamma == 1), noise=0.5)
    bold = [line.strip().partition(" & ")[0] for line in to_latex(comparison, "isic").splitlines() if "mathbf" in line]
    entries = {str(setting): comparison.entry(None, setting, "test", "uwa") for setting in comparison.settings}
    assert bold == [name for name, entry in entries.items() if entry is not None and entry.differs]
    assert "FCL" in bold


def test_the_misprint_is_named_in_its_row_and_in_the_caption_of_its_table() -> None:
    text = to_latex(of("gamma", runs=1), "gamma")
    accuracy, uwa = re.findall(r"\\begin\{table\*\}.*?\\end\{table\*\}", text, flags=re.DOTALL)[:2]
    row = next(part for part in uwa.split(r"\midrule") if "60:40 &" in part)
    assert row.splitlines()[2].strip() == rf"& \textit{{published}}{' & misprint' * 6} \\"
    assert "UWA of 60:40 over gamma is a misprint" in uwa
    assert "misprint" not in accuracy


@pytest.mark.parametrize(("runs", "told"), [(1, "over 1 run, and"), (3, "over 3 runs, and")])
def test_a_caption_counts_its_runs(runs: int, told: str) -> None:
    assert told in to_latex(of("eta", runs=runs), "eta")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="pdflatex is not installed")
@pytest.mark.parametrize("table", ["eta", "gamma", "isic"])
@pytest.mark.parametrize("options", ["", "twocolumn"])
def test_the_whole_table_fits_a_page(table: str, options: str, tmp_path: Path) -> None:
    head = rf"\documentclass[{options}]{{article}}\usepackage{{booktabs}}\begin{{document}}"
    (tmp_path / "page.tex").write_text(f"{head}\n{to_latex(of(table), table)}\n\\end{{document}}\n")
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "page.tex"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=120)
    log = (tmp_path / "page.log").read_text(errors="replace")
    assert re.findall(r"Overfull \\hbox.*|.*Float too large.*", log) == []


def test_what_latex_would_read_as_a_command_is_printed() -> None:
    assert escape(r"5 % of a_b & {c} \d ~ $#") == (r"5 \% of a\_b \& \{c\} \textbackslash{}d \textasciitilde{} \$\#")
