"""Nothing leaves the machine: every verb is traced by the kernel, which also sees what native libraries do."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import lopsided
from tiny import write_photos
from tiny_command import environment

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed"),
]

ADDRESS = re.compile(r'sin6?_port=htons\((\d+)\).*?(?:inet_addr\("|inet_pton\(AF_INET6, "|"&?)([0-9a-f.:]+)"')
SMALL = ["threads=1", "encoder.name=mlp-8", "encoder_training.epochs=1", "classifier.epochs=1", "compare_quick=false"]
PROGRAM = """
import shlex, sys
from lopsided import cli
for line in sys.argv[1].strip().splitlines():
    if code := cli.run(shlex.split(line)):
        sys.exit(f"{line} ended with {code}")
"""
"""Runs commands in one process, which spares the imports of each."""
TRACKERS = "--track tensorboard --track mlflow:mlruns --track wandb:."


def addresses(trace: str) -> set[str]:
    """The addresses of other machines in a trace of connect, sendto and sendmsg."""
    found = {address for _, address in ADDRESS.findall(trace)}
    return {address for address in found if not (address.startswith("127.") or address in ("::1", "0.0.0.0", "::"))}


def traced(tmp_path: Path, script: str) -> set[str]:
    """Run a script of commands, one per line, and return the addresses that they and their children talked to."""
    trace, home = tmp_path / "trace.txt", tmp_path / "home"
    home.mkdir(exist_ok=True)
    settings = {"HOME": str(home), "XDG_CACHE_HOME": str(home / ".cache"), "LOPSIDED_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(
        ["strace", "-f", "--seccomp-bpf", "-e", "trace=connect,sendto,sendmsg,sendmmsg", "-o", str(trace),
         sys.executable, "-c", PROGRAM, script],
        cwd=tmp_path, env=environment(**settings), capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    kept = {path.relative_to(home).parts[:2] for path in home.rglob("*") if path.is_file()}
    assert {parts for parts in kept if not {"matplotlib", "wandb"} & {*parts}} == set()
    return addresses(trace.read_text())


def test_one_module_imports_onnxruntime_which_sends_telemetry_unless_it_is_switched_off_before() -> None:
    package = Path(lopsided.__file__).parent
    importing = [
        path for path in package.rglob("*.py") if re.search(r"^\s*(import|from) onnxruntime", path.read_text(), re.M)
    ]
    assert [path.name for path in importing] == ["engine.py"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_photos(tmp_path / "photos", {"cat": 14, "dog": 8})
    write_photos(tmp_path / "pool", {"dog": 3}, start=20)
    return tmp_path


def test_the_trace_sees_a_program_that_talks_to_another_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        sys.modules[__name__], "PROGRAM", "import socket; socket.socket(type=2).connect(('192.0.2.1', 9))"
    )
    assert traced(tmp_path, "") == {"192.0.2.1"}


def test_no_verb_and_no_tracker_talks_to_another_machine(folder: Path) -> None:
    script = f"""
        fit photos --out run --folds 2 image_size=32 --quiet
        predict run photos --out answers.csv --quiet
        evaluate run photos --quiet
        find run pool --class dog --out found --quiet
        report run
        export run --to onnx --out model.onnx
        data photos
        recipes
        losses
        doctor
        cache
        fit photos --out trained --recipe from-scratch {" ".join(SMALL)} {TRACKERS} --quiet
        compare photos --methods ce,cl --seeds 1 --out compared {" ".join(SMALL)} --quiet
    """
    assert traced(folder, script) == set()
