"""Look up the newest release of every dependency and write docs/dependencies.json, for docs/dependencies.md.

    python scripts/dependencies.py [NAME ...]     # about 2 GB are downloaded, one file at a time, and not kept

pip fetches the newest wheel of each direct dependency, and of the indirect ones that the page tells of, from wherever
pip is told to look. The licence and the people are those of the wheel's own metadata. The date is that of the youngest
file in the wheel, which is when it was built; builds that are made to be repeatable write an agreed date instead
(1980-01-01, 2016-01-01, 2020-01-01, 2020-02-02), and then the record has none.
"""

from __future__ import annotations

import argparse
import email
import email.message
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from datetime import UTC, date, datetime
from email.utils import getaddresses
from pathlib import Path

from oldest import ROOT, direct, read

RECORD = ROOT / "docs" / "dependencies.json"
INDIRECT = (
    "click",
    "filelock",
    "hf-xet",
    "httpx2",
    "joblib",
    "protobuf",
    "pydantic-core",
    "requests",
    "urllib3",
)
_AGREED = {date(1980, 1, 1), date(2016, 1, 1), date(2020, 1, 1), date(2020, 2, 2)}


def newest(name: str) -> dict[str, object]:
    """Fetch the newest wheel of a distribution and tell its version, date, licence and people."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        subprocess.run([*command, "--no-cache-dir", "--dest", folder, name], check=True)
        (path,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(path) as wheel:
            (card,) = (file for file in wheel.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", file))
            metadata = email.message_from_string(wheel.read(card).decode())
            dates = {date(*file.date_time[:3]) for file in wheel.infolist()} - _AGREED
    return {
        "version": metadata["Version"],
        "built": max(dates).isoformat() if dates else None,
        "licence": licence(metadata),
        "people": people(metadata),
    }


def people(metadata: email.message.Message) -> list[str]:
    """Names of authors and maintainers, without addresses."""
    plain = {metadata[key] for key in ("Author", "Maintainer") if metadata[key]}
    fields = [str(metadata[key]) for key in ("Author-email", "Maintainer-email") if metadata[key]]
    return sorted(name.strip() for name in plain | {name for name, _ in getaddresses(fields)} if name.strip())


def licence(metadata: email.message.Message) -> str:
    """The licence as the metadata has it: the expression, else the classifier, else the first line of the old field."""
    if metadata["License-Expression"]:
        return str(metadata["License-Expression"])
    classifiers = [line.split(" :: ")[2:] for line in metadata.get_all("Classifier", []) if line.startswith("License")]
    return (
        ", ".join(words[0] for words in classifiers if words)
        or (metadata["License"] or "not told").strip().splitlines()[0]
    )


def main() -> None:
    """Write the record, all of it or the named parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    arguments = parser.parse_args()
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {"command": "python scripts/dependencies.py"}
    tested = {name.lower().replace("_", "-"): version for name, version in read_constraints().items()}
    known = sorted({name.lower() for name in direct()} | set(INDIRECT))
    found = record.setdefault("newest", {})
    for name in arguments.names or known:
        print(name, flush=True)
        found[name] = {**newest(name), "tested": tested.get(name), "looked_up": datetime.now(UTC).date().isoformat()}
        record["newest"] = {key: found[key] for key in sorted(found) if key in known}
        RECORD.write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n")


def read_constraints() -> dict[str, str]:
    """Versions that the suite is run with."""
    return read((ROOT / "constraints.txt").read_text())


if __name__ == "__main__":
    main()
