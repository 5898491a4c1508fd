"""What is lost when the disk fills up, or becomes read-only, at any write of any command that writes?

    python benchmarks/disk.py              prints a table and writes records/disk.json (about half an hour)
    python benchmarks/disk.py fit predict  only these, into the same record

Each command is run once to count what it does to files: folders made, files opened for writing, written, flushed and
renamed. Then it is run again for each of these operations, which fails, and every later one with it (a full disk: half
of the bytes, then ENOSPC; a read-only one: EROFS, also for what removes files), or which fails alone. After each: one
sentence and exit code 2 (reproduce: 1, where a cell failed and the others went on), the files that were to be replaced
are whole, old or new, and no temporary file is left, where files can be removed. Then the disk has room again, and the
same command, fit with --resume, must end with the bytes of the first run. The first thing that does not hold stops it.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
from pathlib import Path
from time import perf_counter

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))
RECORD = ROOT / "benchmarks" / "records" / "disk.json"
STEPS = {"demo": 9, "reproduce": 25}
"""Of the many writes of several runs, their tables and figures, one in so many is tried."""


def main() -> None:
    """Disturb each command at each of its writes."""
    from disk_faults import KINDS
    from disk_jobs import make_jobs
    from lopsided import __version__

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commands", nargs="*")
    parser.add_argument("--record", type=Path, default=RECORD)
    options = parser.parse_args()
    record = json.loads(options.record.read_text()) if options.record.exists() else {"commands": {}}
    record |= {"lopsided": __version__, "python": platform.python_version(), "platform": platform.system()}
    with tempfile.TemporaryDirectory() as folder:
        jobs = make_jobs(Path(folder) / "data")
        print(f"{'command':<18}{'writes':>8}{'tried':>8}{'broken off':>12}{'lost':>6}{'seconds':>9}")
        for name in options.commands or jobs:
            job, begin = jobs[name], perf_counter()
            work = Path(folder) / "work"
            job.learn(work)
            places = range(0, len(job.operations), STEPS.get(name, 1))
            said = [job.disturb(work, kind, at) for kind in KINDS for at in places]
            broken = sum(bool(text) for text in said)
            seconds = round(perf_counter() - begin)
            record["commands"][name] = {
                "writes": len(job.operations), "tried": len(said), "broken_off": broken, "lost": 0, "seconds": seconds,
            }  # fmt: skip
            print(f"{name:<18}{len(job.operations):>8}{len(said):>8}{broken:>12}{0:>6}{seconds:>9}", flush=True)
            options.record.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
