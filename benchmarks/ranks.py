"""How far do the trainings of one process and of two ranks lie apart? The recipe of the demo, in float32.

Run as ``python benchmarks/ranks.py --record benchmarks/records/ranks.json``. The same recipe and seed are trained by
one process, by one process again, and by two ranks (gloo on this machine, one thread each). Two ranks compute the same
sums in another order. The record has the relative difference to the first training in the loss of each epoch, the
largest difference of a predicted probability, and how many predictions of test images differ.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from lopsided.distributed import joined
from lopsided.runs.demo import demo_recipes
from lopsided.runs.run import run_recipe

WAYS = {"again": 1, "two ranks": 2}
"""The number of ranks."""


def train(folder: Path, ranks: int) -> None:
    """Train the recipe into a folder, in as many processes as there are ranks."""
    command = [sys.executable, __file__, "--work", str(folder), str(ranks)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    processes = [subprocess.Popen([*command, str(rank)], env=environment) for rank in range(ranks)]
    codes = [process.wait() for process in processes]
    if any(codes):
        raise SystemExit("a training failed")


def work(folder: str, ranks: int, rank: int) -> None:
    """The part of one rank."""
    torch.set_num_threads(1)
    recipe = demo_recipes()["afcl"].override(threads=1, device="cpu")
    with joined(f"file://{folder}.store", rank=rank, size=ranks) as group:
        run_recipe(recipe, folder, ranks=group)


def losses(folder: Path) -> dict[str, float]:
    """The loss of each epoch, by stage and number."""
    events = [json.loads(line) for line in (folder / "log.jsonl").read_text("utf-8").splitlines()]
    return {f"{e['stage']} {e['epoch']}": e["loss"] for e in events if e["event"] == "epoch"}


def predictions(folder: Path) -> dict[str, dict[str, str]]:
    """The rows of the test images, by image."""
    with (folder / "predictions.csv").open(encoding="utf-8", newline="") as file:
        return {row["name"]: row for row in csv.DictReader(file) if row["split"] == "test"}


def compare(one: Path, other: Path) -> dict[str, Any]:
    """How far two runs lie apart."""
    first, second = losses(one), losses(other)
    rows, others = predictions(one), predictions(other)
    if first.keys() != second.keys() or rows.keys() != others.keys():
        raise SystemExit("the runs have other epochs or images")
    columns = [name for name in next(iter(rows.values())) if name.startswith("p:")]
    gaps = [abs(float(rows[key][name]) - float(others[key][name])) for key in rows for name in columns]
    return {
        "relative_difference_of_loss": {key: abs(second[key] - loss) / abs(loss) for key, loss in first.items()},
        "largest_difference_of_a_probability": max(gaps),
        "test_images": len(rows),
        "predictions_that_differ": sum(rows[key]["predicted"] != others[key]["predicted"] for key in rows),
    }


def uwa(folder: Path) -> float:
    """The unweighted accuracy on the test images."""
    return float(json.loads((folder / "metrics.json").read_text("utf-8"))["test"]["figures"]["uwa"]["value"])


def main() -> None:
    """Train in all ways and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path)
    parser.add_argument("--work", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        folder, *numbers = options.work
        work(folder, *map(int, numbers))
        return
    record: dict[str, Any] = {"command": "python benchmarks/ranks.py --record benchmarks/records/ranks.json"}
    with tempfile.TemporaryDirectory() as temporary:
        base = Path(temporary) / "base"
        train(base, 1)
        record["uwa"] = {"one process": uwa(base)}
        for name, ranks in WAYS.items():
            folder = Path(temporary) / name.replace(" ", "-")
            train(folder, ranks)
            record[name] = compare(base, folder)
            record["uwa"][name] = uwa(folder)
            print(name, json.dumps(record[name]), flush=True)
    record["machine"] = {"torch": torch.__version__, "cores": os.cpu_count(), "system": platform.system()}
    if options.record:
        options.record.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
