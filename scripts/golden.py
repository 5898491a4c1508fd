"""Tiny runs of every kind, and the SHA-256 of what they find: a change that should alter no result alters none.

    python scripts/golden.py before.json --src ../before/src     # the digests of another checkout
    python scripts/golden.py before.json --check                 # the same runs here; exit 1 if one differs

Last digits depend on the machine and its libraries, so that no digests are committed: make them from the commit before.
A digest covers the model, the predictions and the metrics, without times, words and paths. Runs that were killed or
shared by two ranks must have the digest of the run that was not.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
COUNTS = {"cat": 26, "dog": 10, "fox": 8}
SMALL = {
    "threads": 1, "device": "cpu", "compare_quick": False, "encoder.name": "mlp",
    "encoder_training.epochs": 3, "encoder_training.batch_size": 16, "classifier.epochs": 3, "head.out": 8,
}  # fmt: skip
CE = {**SMALL, "method": "end-to-end", "encoder_training.loss": "ce"}
FROZEN = {
    "threads": 1, "compare_quick": False, "method": "frozen", "data.val": 0.0, "augment.normalisation": "weights",
    "encoder.name": "tf_efficientnet_lite0+pixels", "encoder.weights": "embedded", "encoder.scaling": "root",
}  # fmt: skip
ADAPTER = {
    **FROZEN, "method": "adapter", "encoder.scaling": "none", "adapter.heads": 2, "adapter.hidden": 16,
    "adapter.out": 8, "encoder_training.epochs": 2, "encoder_training.loss.name": "acl",
    "encoder_training.loss.eta": 0.5,
}  # fmt: skip
TUNED = {
    **FROZEN, "method": "fine-tune", "encoder.name": "tf_efficientnet_lite0", "encoder_training.loss": "ce",
    "encoder_training.batch_size": 8, "fine_tune.blocks": 1, "fine_tune.views": 2, "fine_tune.steps": 8,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "frozen": FROZEN,
    "frozen-folds": {**FROZEN, "data.folds": 3},
    "frozen-ensemble": {**FROZEN, "data.folds": 3, "final": "ensemble"},
    "frozen-views": {**FROZEN, "encoder.name": "tf_efficientnet_lite0+tf_efficientnet_lite1", "encoder.views": "auto",
                     "encoder.weights": "embedded+embedded", "encoder.scaling": "cube-root", "data.image_size": 64},
    "adapter": ADAPTER,
    "adapter-folds": {**ADAPTER, "data.folds": 2},
    "fine-tune-blend": {**TUNED, "fine_tune.blend": 0.5},
    "fine-tune-crt": {**TUNED, "fine_tune.blend": 0.0, "classifier.kind": "crt", "classifier.epochs": 2},
    "two-stage": SMALL,
    "two-stage-folds": {**SMALL, "data.folds": 2},
    "two-stage-tau": {**SMALL, "classifier.kind": "tau-norm"},
    "two-stage-queue": {**SMALL, "encoder_training.views": 2, "encoder_training.queue": 16,
                        "encoder_training.sampler": "balanced", "decision.rule": "recall:dog>=0.5"},
    "end-to-end": CE,
    "end-to-end-refit": {**CE, "data.folds": 2, "final": "refit", "data.val": 0.0},
    "end-to-end-crt": {**CE, "classifier.kind": "crt"},
    "end-to-end-lws": {**CE, "classifier.kind": "lws"},
    "end-to-end-mixed": {**CE, "encoder_training.mixup": 0.2, "encoder_training.ema": 0.9,
                         "encoder_training.sam_rho": 0.05},
}  # fmt: skip
KILLED = {"two-stage": 4, "end-to-end-crt": 5, "two-stage-folds": 3, "fine-tune-blend": 2}
"""Runs that are killed at this write of a checkpoint, and resumed."""
RANKS = ("two-stage", "frozen")
"""Runs that two ranks share. Ranks add in another order, so these have digests of their own."""
_WORDS = frozenset({"notes", "warnings", "facts", "seconds", "environment"})
_METRICS = ("classes", "counts", "folds", "views", "decision", "val", "test", "held_out", "leaks")
_SERVER = """
import os, sys, json
import torch, timm
from lopsided import cli
from lopsided.training import checkpoint
replace = os.replace
def run(words, fatal):
    left = fatal
    def die(source, target, **options):
        nonlocal left
        left -= "checkpoint" in str(target)
        if left == 0:
            os._exit(9)
        replace(source, target, **options)
    if fatal:
        checkpoint.TIMES_AS_LONG, os.replace = 0.0, die
    return cli.run(words)
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        os._exit(run(*json.loads(line)))
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
"""Imports everything once, and runs each command in a fork of itself. A fatal write ends the command like a kill."""


def main() -> int:
    """Make the runs, and write or check their digests."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="where the digests are")
    parser.add_argument("--src", type=Path, default=ROOT / "src", help="the sources to run (default: those beside)")
    parser.add_argument("--check", action="store_true", help="compare with the file instead of writing it")
    parser.add_argument("--only", default="", help="only runs whose name starts with one of these, comma-separated")
    asked = parser.parse_args()
    known = json.loads(asked.file.read_text()) if asked.check else {}
    digests, differ = {}, []
    with tempfile.TemporaryDirectory() as folder:
        for name, digest in _runs(Path(folder), asked.src.resolve(), tuple(asked.only.split(","))):
            digests[name] = digest
            same = not asked.check or known.get(name) == digest
            differ += [] if same else [name]
            print(f"{'same  ' if asked.check and same else 'DIFFERS' if not same else 'made  '} {name}", flush=True)
            for part in [] if same else digest:
                if known.get(name, {}).get(part) != digest[part]:
                    print(f"        {part}")
    if not asked.check:
        asked.file.write_text(json.dumps(digests, indent=1) + "\n")
    return 1 if differ else 0


def _runs(folder: Path, src: Path, only: tuple[str, ...]) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the name and the digests of each run."""
    os.environ |= {
        "PYTHONPATH": str(src), "LOPSIDED_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "passive", "ORT_DISABLE_TELEMETRY": "1",
    }  # fmt: skip
    photos = folder / "photos"
    _write_photos(photos)
    with (folder / "stderr.txt").open("w") as errors:
        server = subprocess.Popen(
            [sys.executable, "-c", _SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
        )
    for name, fields in CASES.items():
        if not name.startswith(only):
            continue
        recipe = folder / f"{name}.toml"
        recipe.write_text(_toml(fields))
        words = ["fit", str(photos), "--recipe", str(recipe), "--quiet", "--out"]
        plain = folder / name
        try:
            _call(server, [*words, str(plain)])
        except SystemExit:
            print((folder / "stderr.txt").read_text()[-2000:], file=sys.stderr)
            raise
        digest = _digest(plain)
        yield name, digest
        if name in KILLED:
            out = str(folder / f"{name}-killed")
            _call(server, [*words, out], fatal=KILLED[name])
            _call(server, [*words, out, "--resume"])
            again = _digest(Path(out))
            if again != digest:
                raise SystemExit(f"{name}: killed and resumed differs: {again} instead of {digest}")
            yield f"{name} killed", again
        if name in RANKS:
            out = str(folder / f"{name}-ranks")
            ranks = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m"]
            subprocess.run([*ranks, "lopsided", *words, out], stdout=subprocess.DEVNULL, check=True)
            yield f"{name} two ranks", _digest(Path(out))
    assert server.stdin is not None
    server.stdin.close()
    server.wait()


def _call(server: subprocess.Popen[str], words: list[str], fatal: int = 0) -> None:
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write(json.dumps([words, fatal]) + "\n")
    server.stdin.flush()
    while not (line := server.stdout.readline()).strip().lstrip("-").isdigit():  # What the command prints.
        if not line:
            raise SystemExit("the process that runs the commands has died")
    code, expected = int(line), 9 if fatal else 0
    if code != expected:
        raise SystemExit(f"lopsided {' '.join(words)}\nended with {code} instead of {expected}")


def _write_photos(folder: Path) -> None:
    sys.path.insert(0, str(ROOT / "tests"))
    from tiny import write_photos

    write_photos(folder, COUNTS)


def _toml(fields: dict[str, Any]) -> str:
    """Return a recipe; the tables of losses come after the fields of their section."""
    lines = [f"{name} = {json.dumps(value)}" for name, value in fields.items()]
    return "\n".join(lines) + "\n"


def _digest(run: Path) -> dict[str, str]:
    metrics = json.loads((run / "metrics.json").read_text())
    content = {name: _without_words(metrics.get(name)) for name in _METRICS}
    parts = {name: (run / name).read_bytes() for name in ("model.safetensors", "predictions.csv")}
    parts["metrics"] = json.dumps(content, sort_keys=True).encode()
    return {name: hashlib.sha256(part).hexdigest()[:16] for name, part in parts.items()}


def _without_words(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_words(each) for name, each in value.items() if name not in _WORDS}
    return [_without_words(each) for each in value] if isinstance(value, list) else value


if __name__ == "__main__":
    sys.exit(main())
