"""The methods of the field, ResNet-18 from scratch, equal numbers of epochs: Fashion-MNIST and ISIC 2018.

    lopsided compare --recipe studies/recipes/base.toml --baseline weighted-ce --scenario 90:10,98:2 --seeds 6 \\
      --methods weighted-ce,ce,focal,logit-adjusted,class-balanced,label-aware-smoothing,ldam,cl,fcl,acl,afcl --out CMP
    lopsided compare ... --methods studies/recipes/bcl.toml,studies/recipes/ce-drw.toml     # and the other files there
    lopsided compare ... --scenario 90:10,95:5,98:2 --seeds 12 --methods weighted-ce,cl,acl,afcl --out CMP
    python studies/from_scratch.py CMP          # copy the records of the comparison to studies/records/methods.jsonl
    lopsided compare --recipe studies/recipes/tail.toml --baseline weighted-ce --seeds 3 --out TAIL \\
      --methods weighted-ce,ce,logit-adjusted,ldam,cl,acl,afcl,studies/recipes/bcl.toml     # and ce-mixup-crt
    python studies/from_scratch.py --tail TAIL  # the same for studies/records/methods_tail.jsonl, all ten classes
    python studies/from_scratch.py              # print the table of both records
    python studies/from_scratch.py --pairs      # the paper's family against CL, on the same seeds
    lopsided compare --recipe studies/recipes/isic.toml --folds 5 --methods quick,ce,weighted-ce,cl,afcl --out ISIC
    python studies/from_scratch.py --isic ISIC  # the same for studies/records/methods_isic.jsonl
    python studies/from_scratch.py --isic

To add to a record whose folder is gone, make a folder with the record as ``records.jsonl`` and {"format": 1} as
``sweep.json``: finished runs are then not trained again.

All methods train for 20 epochs: 16 and 4 if there are two stages. SupMin, SupProto and BCL see two views of each image,
and SAM computes two gradients, so these take twice the time. 700 of the 1,000 images that a scenario draws train and
validate; the figures are those of held-out images, which the run has not drawn, with as many of each class. The long
tail has 2,000 training images of ten classes, 8 of the rarest, and the first 2,500 test images of Fashion-MNIST.
``balanced`` is UWA by the rule of the package, ``plain`` that of the most probable class. The differences are paired by
seed, with Student's interval, not corrected for the number of methods.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import shared
from lopsided.evaluation.resampled import fold_overlap

RECORD = shared.RECORDS / "methods.jsonl"
RECORD_ISIC = RECORD.with_name("methods_isic.jsonl")
RECORD_TAIL = RECORD.with_name("methods_tail.jsonl")
BASE = "weighted-ce"


def read(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a record, by method, scenario and seed."""
    lines = [line | {"compared_as": Path(line["compared_as"]).stem} for line in shared.read(path)]
    return sorted(lines, key=lambda line: (line["scenario"] or "", line["compared_as"], line["seed"], _fold(line)))


def read_fashion() -> list[dict[str, Any]]:
    """Return the lines of both comparisons on Fashion-MNIST: the tops, and the long tail of ten classes."""
    return read(RECORD) + read(RECORD_TAIL)


def _fold(line: dict[str, Any]) -> int:
    return line["fold"]["fold"] if line["fold"] else 0


def figures(line: dict[str, Any]) -> dict[str, float]:
    """Return the figures of the held-out images, or of the fold, in percent, and the minutes of the run."""
    held = line["held_out"] or line["test"]
    rules = dict(held["rules"])
    shares = {"balanced": rules["balanced"], "plain": rules["plain"], "auroc": held["auroc"]}
    return {**{name: 100 * value for name, value in shares.items()}, "minutes": line["seconds"] / 60}


def _rows(methods: dict[str, shared.Runs], base: str, overlap: float = 0.0) -> Iterator[list[str]]:
    """Yield the cells of each method, the highest mean of ``balanced`` first."""
    means = {method: statistics.mean(run["balanced"] for run in runs.values()) for method, runs in methods.items()}
    for method in sorted(methods, key=lambda name: -means[name]):
        runs = methods[method]
        cells = shared.compared(runs, methods[base], "balanced", "plain", "auroc", overlap=overlap)
        yield [method, str(len(runs)), *cells, f"{statistics.median(run['minutes'] for run in runs.values()):.1f}"]


def table(lines: list[dict[str, Any]]) -> str:
    """Return a row for each method and scenario, the highest mean of ``balanced`` first."""
    settings = shared.nested(({**line, **figures(line)} for line in lines), "scenario", "compared_as", "seed")
    rows = [(scenario, *row) for scenario in sorted(settings) for row in _rows(settings[scenario], BASE)]
    head = "proportions | method | runs | balanced | minus weighted CE | plain | AUROC | minus weighted CE | minutes"
    return shared.table(head, rows)


def pairs_table(lines: list[dict[str, Any]]) -> str:
    """Return the differences of FCL, ACL and AFCL to CL, paired by seed, with Student's 95 % interval."""
    rows = []
    settings = shared.nested(({**line, **figures(line)} for line in lines), "scenario", "compared_as", "seed")
    for scenario, methods in sorted(settings.items()):
        for method in ("fcl", "acl", "afcl"):
            runs = {seed: run for seed, run in methods.get(method, {}).items() if seed in methods.get("cl", {})}
            if len(runs) > 1:
                cells = [shared.minus(runs, methods["cl"], name) for name in ("balanced", "auroc")]
                rows.append((scenario, f"{method.upper()} - CL", len(runs), *cells))
    return shared.table("proportions | difference | pairs | balanced accuracy | AUROC", rows)


def isic_table(lines: list[dict[str, Any]]) -> str:
    """Return a row for each method on the folds of ISIC 2018, and the differences to ``quick``, corrected for folds."""
    overlap = fold_overlap([line["test"]["images"] for line in lines], [line["fold"]["rest"] for line in lines])
    methods = shared.nested(({**line, **figures(line), "fold": _fold(line)} for line in lines), "compared_as", "fold")
    head = "method | folds | balanced | minus quick | plain | AUROC | minus quick | minutes"
    return shared.table(head, _rows(methods, "quick", overlap))


def main() -> None:
    """Copy the records of a comparison, if one is given, and print the table."""
    parser = shared.parser(__doc__)
    parser.add_argument("comparison", type=Path, nargs="?", help="the folder of a comparison")
    parser.add_argument("--isic", action="store_true", help="the record of the comparison on ISIC 2018")
    parser.add_argument("--tail", action="store_true", help="the record of the comparison on a long tail")
    parser.add_argument("--pairs", action="store_true", help="only FCL, ACL and AFCL against CL")
    given = parser.parse_args()
    record = RECORD_ISIC if given.isic else RECORD_TAIL if given.tail else RECORD
    if given.comparison is not None:
        shared.write_lines(record, read(given.comparison / "records.jsonl"))
    shown = isic_table if given.isic else pairs_table if given.pairs else table
    print(shown(read(RECORD_ISIC) if given.isic else read_fashion()))


if __name__ == "__main__":
    main()
