"""What does a recipe cost? Processor time and peak memory of ``lopsided fit``, from images to model.

    python studies/costs.py [--data tops|isic] [--resnet50 FILE]     # the missing lines of studies/records/costs.jsonl
    python studies/costs.py --table                                  # print the record

Each method is one process with an empty cache of features and two threads. ``tops`` are 1,000 images of Fashion-MNIST
at 98:2, of which 700 train and 300 are tested. ``isic`` are the 1,228 melanomas and dermatofibromas of ISIC 2018
($LOPSIDED_DATA), of which 15 % are tested, by lesion. The comparison with the recipe ``quick``, which other recipes
make, is left out. ``processor`` are the seconds of all threads, start-up and report data included, so that half of them
divided by 60 is about the time in minutes of two idle cores. ``seconds`` is what the clock said, on a machine that may
have been busy. ``memory`` is the peak in MiB.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import shared

RECORD = shared.RECORDS / "costs.jsonl"
RECIPES = Path(__file__).parent / "recipes"
NAMED = ("quick", "thorough", "adapter", "fine-tune")
LOSSES = ("ce", "weighted-ce", "cl", "afcl")
FILES = ("bcl", "supmin", "ce-sam", "ce-mixup-crt")
DATA = {
    "tops": ["fashion-mnist-tops", "scenario=98:2,total=1000", "split=stratified", "test=0.3"],
    "isic": ["isic2018", "split=group", 'data.classes=["MEL", "DF"]'],
}
BASES = {"tops": RECIPES / "base.toml", "isic": RECIPES / "isic.toml"}


def commands(data: str, resnet50: str | None) -> dict[str, list[str]]:
    """Return the arguments of ``lopsided fit`` for each method."""
    found = {name: ["--recipe", name] for name in NAMED}
    found["adapter blend"] = ["--recipe", "adapter", "adapter.blend=0.5"]
    if resnet50 is not None:
        found["resnet50"] = ["--recipe", "quick", "--encoder", "resnet50", f"weights={resnet50}"]
    found |= {loss: ["--recipe", str(BASES[data]), "--loss", loss] for loss in LOSSES}
    if data == "tops":
        found |= {name: ["--recipe", str(RECIPES / f"{name}.toml")] for name in FILES}
    return {method: [*DATA[data], *own, "compare_quick=false"] for method, own in found.items()}


def measure(arguments: list[str]) -> dict[str, Any]:
    """Run ``lopsided fit`` in a process of its own and return its costs."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "LOPSIDED_CACHE": f"{folder}/cache", "OMP_NUM_THREADS": "2"}
        command = [sys.executable, "-m", "lopsided", "fit", *arguments, "--folds", "1", "--quiet", "--out"]
        begin = time.perf_counter()
        process = subprocess.Popen([*command, f"{folder}/run"], env=environment, stdout=subprocess.DEVNULL)
        _, status, used = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - begin
    if status:
        sys.exit(f"{' '.join(arguments)} failed.")
    processor = used.ru_utime + used.ru_stime
    return {"processor": round(processor, 1), "seconds": round(seconds, 1), "memory": used.ru_maxrss // 1024}


def table(lines: list[dict[str, Any]]) -> str:
    """Return a row for each method."""
    rows = ((line["data"], line["method"], f"{line['processor'] / 120:.1f}", f"{line['memory']:,}") for line in lines)
    return shared.table("data | method | minutes of two cores | peak memory, MiB", rows)


def main() -> None:
    """Measure the methods that the record does not hold, and print it."""
    parser = shared.parser(__doc__)
    parser.add_argument("--data", choices=sorted(DATA))
    parser.add_argument("--methods", help="separated by commas; default: all")
    parser.add_argument("--resnet50", help="a file of ImageNet weights")
    parser.add_argument("--table", action="store_true")
    given = parser.parse_args()
    for data in [] if given.table else [given.data] if given.data else list(DATA):
        wanted = commands(data, given.resnet50)
        cells = ({"data": data, "method": method} for method in (given.methods.split(",") if given.methods else wanted))
        shared.compute_missing(RECORD, cells, lambda cell, wanted=wanted: measure(wanted[cell["method"]]))
    print(table(shared.read(RECORD)))


if __name__ == "__main__":
    main()
