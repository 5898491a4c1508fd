"""Does ``fit --auto --minutes N`` keep to its minutes, and does the run have the metrics of the comparison?

    python benchmarks/auto.py TABLE N...        adds to benchmarks/records/auto.json

TABLE is a table or a folder with two classes or more, as ``fit`` reads it. For each N it is fitted in a process of its
own with an empty cache, and again with the features of the first run. A row holds the minutes of the whole process
and their ratio to N, which methods were compared and which were left out, the balanced accuracy of the chosen method as
the comparison states it and as the run does, and the load of the machine before.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from lopsided import files

RECORD = Path(__file__).parent / "records" / "auto.json"
JUDGED = re.compile(r"Judged like the run, by the images of all folds together: (.*) per cent")
CHOSEN = re.compile(r"Use ([a-z-]+)")
LEFT_OUT = re.compile(r"^([a-z-]+) was left out: (.*)\.$", re.MULTILINE)


def run(data: str, minutes: float, cache: Path, out: Path) -> dict[str, Any]:
    """Fit once, and return how long it took and what was said."""
    load = os.getloadavg()[0]
    command = [sys.executable, "-m", "lopsided", "fit", data, "--auto", f"minutes={minutes:g}"]
    begin = time.monotonic()
    ended = subprocess.run(
        [*command, "--out", str(out), "allow_outside=true"], capture_output=True, text=True, check=False,
        env={**os.environ, "LOPSIDED_CACHE": str(cache), "COLUMNS": "10000"},
    )  # fmt: skip
    took = (time.monotonic() - begin) / 60
    assert ended.returncode == 0, ended.stderr
    said = ended.stdout + ended.stderr
    judged, chosen = JUDGED.search(said), CHOSEN.search(said)
    assert judged is not None, said
    assert chosen is not None, said
    compared = {name: float(value) for name, value in (each.rsplit(" ", 1) for each in judged[1].split(", "))}
    metrics = json.loads((out / "metrics.json").read_text())
    return {
        "minutes": minutes,
        "took": round(took, 2),
        "ratio": round(took / minutes, 2),
        "compared": compared,
        "left_out": dict(LEFT_OUT.findall(said)),
        "chosen": chosen[1],
        "run": round(100 * metrics["test"]["figures"]["uwa"]["value"], 1),
        "load_before": round(load, 1),
    }


def main() -> None:
    """Fit with each number of minutes, and add to the record."""
    data, *numbers = sys.argv[1:]
    rows: dict[str, Any] = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        for number in map(float, numbers):
            for state in ("new", "cached"):
                place = Path(folder) / f"{number:g}"
                name = f"{Path(data).stem}, {number:g} minutes, {state}"
                rows[name] = run(data, number, place / "cache", place / state)
                print(name, rows[name], flush=True)
                files.atomic_write(RECORD, json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
