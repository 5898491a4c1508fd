"""The methods of the field on Fashion-MNIST tops, ResNet-18 from scratch, equal numbers of epochs.

    lopsided compare --recipe benchmarks/arms/base.toml --baseline weighted-ce --scenario 90:10,98:2 --seeds 6 \\
      --arms weighted-ce,ce,focal,logit-adjusted,class-balanced,label-aware-smoothing,ldam,cl,fcl,acl,afcl --out CMP
    lopsided compare ... --arms benchmarks/arms/bcl.toml,benchmarks/arms/ce-drw.toml     # and the other files there
    python benchmarks/arms.py CMP          # copy the records of the comparison to docs/records/methods.jsonl
    python benchmarks/arms.py              # print the table of the records

All arms train for 20 epochs: 16 and 4 if there are two stages. SupMin, SupProto and BCL see two views of each image,
and SAM computes two gradients, so these take twice the time. 700 of the 1,000 images that a scenario draws train and
validate; the figures are those of held-out images, which the run has not drawn, with as many of each class.
``balanced`` is UWA by the rule of the package, ``plain`` that of the most probable class. The differences are paired by
seed, with Student's interval, not corrected for the number of arms.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

from adapters import _interval
from lopsided import files

RECORD = Path(__file__).parents[1] / "docs" / "records" / "methods.jsonl"
BASE = "weighted-ce"


def read(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a record, by arm, scenario and seed."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        line["arm"] = Path(line["arm"]).stem
    return sorted(lines, key=lambda line: (line["scenario"], line["arm"], line["seed"]))


def figures(line: dict[str, Any]) -> dict[str, float]:
    """Return the figures of the held-out images in percent, and the minutes of the run."""
    held, rules = line["held_out"], dict(line["held_out"]["rules"])
    shares = {"balanced": rules["balanced"], "plain": rules["plain"], "auroc": held["auroc"]}
    return {**{name: 100 * value for name, value in shares.items()}, "minutes": line["seconds"] / 60}


def table(lines: list[dict[str, Any]]) -> str:
    """Return a row for each arm and scenario, the highest mean of ``balanced`` first."""
    rows = ["| proportions | arm | runs | balanced | minus weighted CE | plain | AUROC | minus weighted CE | minutes |"]
    rows.append("|---" * 9 + "|")
    for scenario in sorted({line["scenario"] for line in lines}):
        arms: dict[str, dict[int, dict[str, float]]] = {}
        for line in lines:
            if line["scenario"] == scenario:
                arms.setdefault(line["arm"], {})[line["seed"]] = figures(line)
        means = {arm: statistics.mean(run["balanced"] for run in runs.values()) for arm, runs in arms.items()}
        for arm in sorted(arms, key=lambda name: -means[name]):
            runs = arms[arm]
            cells = [scenario, arm, str(len(runs))]
            for name in ("balanced", "plain", "auroc"):
                cells.append(f"{statistics.mean(run[name] for run in runs.values()):.1f}")
                pairs = [run[name] - arms[BASE][seed][name] for seed, run in runs.items() if seed in arms[BASE]]
                if name != "plain":
                    cells.append("" if arm == BASE or not pairs else _interval(pairs))
            cells.append(f"{statistics.median(run['minutes'] for run in runs.values()):.1f}")
            rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def main() -> None:
    """Copy the records of a comparison, if one is given, and print the table."""
    if len(sys.argv) > 1:
        found = read(Path(sys.argv[1]) / "records.jsonl")
        files.atomic_write(RECORD, "".join(json.dumps(line) + "\n" for line in found))
    print(table(read(RECORD)))


if __name__ == "__main__":
    main()
