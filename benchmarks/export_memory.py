"""The peak memory of ``export`` to ONNX, beside the size of the model.

    python benchmarks/export_memory.py RUN        adds to benchmarks/records/export_memory.json

RUN is the folder of a finished run, for example of ``fit photos --recipe thorough``. The record has one row for each
encoder and number of views. The memory is that of the process
of the command, which also compares the answers of the ONNX file with those of the model.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

from lopsided import files

RECORD = Path(__file__).parent / "records" / "export_memory.json"


def main() -> None:
    """Export, and write the record."""
    run = Path(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "model.onnx"
        command = [sys.executable, "-m", "lopsided", "export", str(run), "--to", "onnx", "--out", str(out)]
        subprocess.run(command, check=True)
        exported = out.stat().st_size
    card = json.loads((run / "model.json").read_text())
    row = {
        "model_megabytes": round((run / "model.safetensors").stat().st_size / 1e6, 1),
        "onnx_megabytes": round(exported / 1e6, 1),
        "peak_megabytes": round(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e3),
    }
    name = f"{card['encoder']}, {len(card['views'])} views"
    print(name, row)
    rows = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    files.atomic_write(RECORD, json.dumps({**rows, name: row}, indent=1) + "\n")


if __name__ == "__main__":
    main()
