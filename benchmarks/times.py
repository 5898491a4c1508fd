"""How long ``fit`` says that it will take, and how long it takes.

    python benchmarks/times.py TABLE...        adds to benchmarks/records/times.json

TABLE is a table or a folder with two classes, as ``fit`` reads it. Each is fitted by quick, thorough and few,
first with an empty cache and then with the features of the first run. ``said`` is what the first sentence says and
``took`` the time from then on; ``left_said`` is what the run says after its second training, and ``left_took`` the time
from then on. ``process`` is the time of the whole process. The record also holds the load of the machine before.
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

RECORD = Path(__file__).parent / "records" / "times.json"
SAID = re.compile(r"This will take about ([\d.]+) (s|min)")
LEFT = re.compile(r"About ([\d.]+) (s|min) left")


def seconds(found: re.Match[str] | None) -> float | None:
    """Return the seconds that a sentence names."""
    return None if found is None else float(found[1]) * (60 if found[2] == "min" else 1)


def run(data: str, recipe: str, cache: Path, out: Path) -> dict[str, Any]:
    """Fit once, and return what was said and what it took."""
    load = os.getloadavg()[0]
    said: list[tuple[float, float]] = []
    left: list[tuple[float, float]] = []
    environment = {**os.environ, "LOPSIDED_CACHE": str(cache)}
    command = [sys.executable, "-m", "lopsided", "fit", data, "--recipe", recipe, "--folds", "5", "--out", str(out)]
    begin = time.monotonic()
    command += ["allow_outside=true"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr is not None
        for line in process.stderr:
            for pattern, found in ((SAID, said), (LEFT, left)):
                if (number := seconds(pattern.search(line))) is not None:
                    found.append((number, time.monotonic()))
    end = time.monotonic()
    assert process.returncode == 0
    row: dict[str, Any] = {"load_before": round(load, 1), "process": round(end - begin, 1)}
    for start, found in (("", said), ("left_", left)):
        if found:
            number, when = found[0]
            took = end - when
            row |= {f"{start}said": number, f"{start}took": round(took, 1), f"{start}ratio": round(number / took, 2)}
    return row


def main() -> None:
    """Fit all tables and add to the record."""
    rows: dict[str, Any] = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        for number, data in enumerate(sys.argv[1:]):
            for recipe in ("quick", "thorough", "few"):
                for state in ("new", "cached"):
                    place = Path(folder) / f"{number}-{recipe}"
                    name = f"{Path(data).stem}, {recipe}, {state}"
                    rows[name] = run(data, recipe, place / "cache", place / state)
                    print(name, rows[name], flush=True)
                    files.atomic_write(RECORD, json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
