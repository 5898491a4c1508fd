"""Renew the tables, verdicts and figures of docs/results.md from the records in results/.

    python scripts/results.py

Each part of the page stands between two marks, which are comments; the rest is written by hand. The commands
that made the records are said in each part; the same commands with ``--records FILE --out FOLDER`` write the tables
as CSV and LaTeX too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from lopsided.experiments.compare import Comparison, Protocol, compare, select
from lopsided.experiments.paper import FIGURES, base_recipe, make_plan
from lopsided.experiments.records import Record, read_records
from lopsided.reports.figures import write_figures
from lopsided.reports.tables import blocks, markdown_table, notes, runs_text, title, verdict_rows

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "results.md"
DRAWN = ROOT / "docs" / "figures" / "results"
FOUR = "50:50,90:10,95:5,98:2"
WEIGHTS = "resnet50_imagenet.safetensors"
LOSSES = "cl,acl:300,afcl:0:7,afcl:300:7"


@dataclass(frozen=True)
class Part:
    """One table of the page: where its records are, and the command that made them."""

    name: str
    table: str
    file: str
    protocol: dict[str, str] = field(default_factory=dict)
    scenarios: str | None = None
    losses: str | None = None
    runs: int | None = None

    @property
    def path(self) -> Path:
        """The file of its records."""
        return ROOT / "results" / self.file

    @property
    def command(self) -> str:
        """What makes the records."""
        options = {**self.protocol, "scenarios": self.scenarios, "losses": self.losses, "runs": self.runs}
        given = [f"--{name} {value}" for name, value in options.items() if value is not None]
        return " ".join(["lopsided reproduce", self.table, "--out SWEEP", *given])

    @property
    def figures(self) -> tuple[str, ...]:
        """The figures that are drawn: none of a single cell."""
        return () if self.losses is not None and "," not in self.losses else FIGURES

    def read(self) -> tuple[Comparison, list[Record]]:
        """Compare its records, and return those that it is made of."""
        base = base_recipe(self.table, **self.protocol)
        plan = make_plan(self.table, base, scenarios=self.scenarios, losses=self.losses)
        kept = select(read_records(self.path)[0], self.table, Protocol.of(base))
        if self.losses is None:
            shown = set(plan.settings)
            kept = [record for record in kept if any((s.eta, s.gamma) == (record.eta, record.gamma) for s in shown)]
            return compare(kept, self.table, Protocol.of(base)), kept
        return compare(kept, self.table, Protocol.of(base), scenarios=plan.scenarios, settings=plan.settings), kept


PARTS = (
    Part("eta", "eta", "fmnist.jsonl"),
    Part("gamma", "gamma", "fmnist.jsonl"),
    Part("released", "eta", "fmnist-released.jsonl", {"normalization": "released"}, FOUR, LOSSES),
    Part("isic-image", "isic", "isic-small.jsonl", {"preset": "small"}),
    Part("isic-lesion", "isic", "isic-small.jsonl", {"preset": "small", "split": "lesion"}),
    Part("isic-paper", "isic", "isic-paper.jsonl", {"weights": WEIGHTS}, losses="afcl:300:7", runs=1),
)


def write_part(part: Part) -> str:
    """Write one part as Markdown; figures are named, not drawn."""
    comparison, records = part.read()
    hours = math.fsum(record.seconds for record in records) / 3600
    threads = max(record.threads for record in records)
    return "\n".join(_lines(part, comparison, len(records), hours, threads))


def _lines(part: Part, comparison: Comparison, runs: int, hours: float, threads: int) -> Iterator[str]:
    cores = "one core" if threads == 1 else f"{threads} cores"
    yield f"`{part.command}`: {runs_text(runs)}, {hours:.1f} hours of {cores}."
    yield ""
    if part.losses is None:
        yield from markdown_table(["claim", "figure and images", "verdict", "because"], verdict_rows(comparison))
        yield ""
    for figure in part.figures:
        yield f"![{title(comparison)}: {figure}](figures/results/{part.name}-{figure}.svg)"
        yield ""
    for block in blocks(comparison):
        yield f"<details><summary>{title(comparison)}: {block.title}</summary>"
        yield ""
        yield from markdown_table(block.header, (row for group in block.groups for row in group))
        yield ""
        yield "</details>"
        yield ""
    for note in notes(comparison):
        yield note
        yield ""


def parts_of(page: str) -> dict[str, str]:
    """Return what stands between the marks of a page, by name."""
    found = re.findall(r"<!-- ([a-z-]+): begin -->\n(.*?)<!-- \1: end -->", page, flags=re.DOTALL)
    return {name: text.strip("\n") for name, text in found}


def renewed(page: str) -> str:
    """Return a page with the parts renewed whose marks it has and whose records there are."""
    for part in PARTS:
        begin, end = f"<!-- {part.name}: begin -->\n", f"<!-- {part.name}: end -->"
        if begin in page and part.path.exists():
            before, rest = page.split(begin, 1)
            page = f"{before}{begin}{write_part(part).strip(chr(10))}\n{end}{rest.split(end, 1)[1]}"
    return page


def main() -> None:
    """Renew the page and draw its figures."""
    PAGE.write_text(renewed(PAGE.read_text("utf-8")), "utf-8")
    for part in PARTS:
        if part.figures and part.path.exists():
            write_figures(part.read()[0], DRAWN, part.name, formats=("svg",))


if __name__ == "__main__":
    main()
