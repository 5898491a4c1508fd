"""``torchrun ... -m lopsided fit``: several processes, one result, one voice."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lopsided import cli
from lopsided.ranks import Ranks
from lopsided.runs.folder import Run
from lopsided.training import loop
from lopsided.training.checkpoint import Checkpoint
from tiny import write_photos
from tiny_command import SMALL, Ended, environment, names_below
from training.ranks import together

pytestmark = pytest.mark.slow

COUNTS = {"cat": 18, "dog": 6}


def command(ranks: Ranks, *arguments: str) -> Ended:
    """The command on one rank, as torchrun would start it."""
    os.environ |= {"RANK": str(ranks.rank), "WORLD_SIZE": str(ranks.size)}
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.run([*arguments])
    return Ended(code, out.getvalue(), err.getvalue())


def several(ranks: Ranks, commands: list[list[str]]) -> list[Ended]:
    return [command(ranks, *arguments) for arguments in commands]


def test_two_ranks_fit_with_one_voice_and_one_folder(tmp_path: Path) -> None:
    photos, out = write_photos(tmp_path / "photos", COUNTS), tmp_path / "run"
    fit = ["fit", str(photos), "--out", str(out), *SMALL, "--json", "--track", "tensorboard"]
    first, second = together(2, tmp_path / "ranks", several, [fit, [*fit, "--resume"], ["recipes", "--json"]])
    assert [ended.code for ended in (*first, *second)] == [0] * 6
    assert json.loads(first[0].out)["environment"]["ranks"] == 2
    assert "2 ranks share each batch of 8 images." in first[0].err
    assert f"The run in {out} is already finished." in first[1].err
    assert [(ended.out, ended.err) for ended in second[:2]] == [("", "")] * 2
    assert Run.open(out).finished
    assert ".lock" not in names_below(out)
    assert len(list((out / "tensorboard").iterdir())) == 1  # Only the first rank tracks.
    rows = [(row["split"], row["name"]) for row in Run.open(out).predictions()]
    assert len(rows) == len(set(rows)) == 8


def test_two_ranks_train_each_fold_together(tmp_path: Path) -> None:
    photos, out = write_photos(tmp_path / "photos", COUNTS), tmp_path / "run"
    fit = ["fit", str(photos), "--out", str(out), "--folds", "2", *SMALL, "--json"]
    first, second = together(2, tmp_path / "ranks", several, [fit, [*fit, "--workers", "2", "--resume"]])
    assert [ended.code for ended in (*first, *second)] == [0, 2, 0, 2]
    metrics = json.loads(first[0].out)
    assert (metrics["environment"]["ranks"], metrics["test"]["num_images"]) == (2, 24)
    assert "--workers trains folds at once and cannot be used with torchrun." in first[1].err
    assert (second[0].out, second[0].err) == ("", "")


ABORTING = """
import atexit, os
from lopsided.cli import main

atexit.register(os.abort)  # As the threads of a group may, when it is taken apart while other ranks end.
main()
"""


def test_torchrun_starts_the_command_and_what_is_wrong_is_said_once(tmp_path: Path) -> None:
    photos, out, script = write_photos(tmp_path / "photos", COUNTS), tmp_path / "run", tmp_path / "aborting.py"
    script.write_text(ABORTING)
    out.mkdir()
    (out / "mine.txt").write_text("not a run")
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]
    launch += ["--rdzv-endpoint", "localhost:0", str(script), "fit", str(photos), "--out", str(out), *SMALL]
    ended = subprocess.run(launch, check=False, capture_output=True, text=True, env=environment(), timeout=600)
    assert ended.returncode != 0
    sentence = f"The folder {out} is not empty."
    assert ended.stderr.count(sentence) == 1
    assert "exitcode  : 2" in ended.stderr
    assert names_below(out) == ["mine.txt"]


def interrupted(ranks: Ranks, arguments: list[str]) -> Ended:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    loop.Loop._facts = interrupt  # type: ignore[method-assign,assignment]
    return command(ranks, *arguments)


def test_an_interrupt_of_several_ranks_advises_the_same_command(tmp_path: Path) -> None:
    photos, out = write_photos(tmp_path / "photos", COUNTS), tmp_path / "run"
    found = together(2, tmp_path / "ranks", interrupted, ["fit", str(photos), "--out", str(out), *SMALL])
    assert [ended.code for ended in found] == [130, 130]
    said = "lopsided: interrupted. Continue with the same command and --resume."
    assert found[0].err.splitlines()[-1] == said


DYING = """
import os, signal, sys
from datetime import timedelta
from lopsided import cli
from lopsided import distributed
from lopsided.training import loop

distributed._PATIENCE = timedelta(minutes=2)  # Who waits does not come to speak.
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun ends those that are left, sooner or later.
if os.environ["RANK"] == "0":
    loop.Loop._facts = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
sys.exit(cli.run(sys.argv[1:]))
"""


def test_a_first_rank_that_is_killed_is_spoken_of_by_another(tmp_path: Path) -> None:
    photos, out, script = write_photos(tmp_path / "photos", COUNTS), tmp_path / "run", tmp_path / "dying.py"
    script.write_text(DYING)
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]
    launch += ["--rdzv-endpoint", "localhost:0", str(script), "fit", str(photos), "--out", str(out), *SMALL]
    ended = subprocess.run(launch, check=False, capture_output=True, text=True, env=environment(), timeout=600)
    assert ended.returncode != 0
    assert "SIGKILL" in ended.stderr
    said = [line for line in ended.stderr.splitlines() if "The connection to another rank failed" in line]
    assert len(said) == 1
    assert said[0].startswith("lopsided, rank 1: The connection to another rank failed (")
    assert said[0].endswith("unless it was killed. Continue with the same command and --resume.")


@pytest.mark.parametrize(("rank", "said"), [("0", True), ("1", False)])
def test_a_wrong_flag_is_said_by_the_first_rank(
    rank: str, said: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", rank)
    assert cli.run(["fit", "--nope"]) == 2
    assert bool(capsys.readouterr().err) == said


TERMINATED = """
import atexit, os, signal
from lopsided.cli import main
from lopsided.training import loop

atexit.register(os.abort)  # As above: neither a success nor a request may end so.
check, steps = loop.Loop._check, []

def checked(*arguments):
    steps.append(1)
    if len(steps) == 4 and os.environ["STOP"] == "yes":
        os.kill(os.getpid(), signal.SIGTERM)
    return check(*arguments)

loop.Loop._check = checked
main()
"""


def test_ranks_that_are_terminated_save_the_step_and_continue_to_the_same_bytes(tmp_path: Path) -> None:
    photos, script = write_photos(tmp_path / "photos", COUNTS), tmp_path / "terminated.py"
    script.write_text(TERMINATED)

    def launched(out: Path, *options: str, stop: str = "no") -> subprocess.CompletedProcess[str]:
        launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]
        launch += ["--rdzv-endpoint", "localhost:0", str(script), "fit", str(photos), "--out", str(out), *options]
        variables = {**environment(), "STOP": stop}
        return subprocess.run(launch, check=False, capture_output=True, text=True, env=variables, timeout=600)

    assert launched(tmp_path / "whole", *SMALL).returncode == 0
    stopped = launched(tmp_path / "run", *SMALL, stop="yes")
    assert "exitcode  : 143" in stopped.stderr, stopped.stderr
    assert not (tmp_path / "run" / ".lock").exists()
    saved = Checkpoint(tmp_path / "run").load()
    assert saved is not None
    assert saved[0].step > 0
    assert launched(tmp_path / "run", *SMALL, "--resume").returncode == 0
    for name in ("model.safetensors", "model.json", "predictions.csv"):
        assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
