from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

from lopsided.facts import cautions, notes
from lopsided.runs import progress

SCRIPT = """
import time
from lopsided.facts import cautions
from lopsided.runs.progress import reporter
with reporter() as watcher:
    tell = watcher.counting("checking images")
    tell(3, 12)
    tell(12, 12)
    watcher.named("afcl")
    watcher.stage("encoder", 2, 4)
    for epoch in (1, 2):
        for step in range(4):
            watcher.step(2.5 - epoch, 128)
        watcher.epoch(epoch, {"loss": 2.5 - epoch, "val_uwa": 0.75})
    watcher.fact(cautions.not_cached("few [images] of dog"))
"""


def run_script(in_terminal: bool, warning: str = "few [images] of dog") -> str:
    script = SCRIPT.replace("few [images] of dog", warning.encode("unicode_escape").decode())
    source = str(Path(__file__).parents[2] / "src")
    environment = {**os.environ, "PYTHONPATH": source, "TERM": "xterm", "COLUMNS": "120"}
    if not in_terminal:
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, env=environment, check=True)
        assert done.stdout == b""
        return done.stderr.decode()
    import pty

    leader, follower = pty.openpty()
    process = subprocess.Popen([sys.executable, "-c", script], stderr=follower, env=environment)
    os.close(follower)
    read = b""
    while True:
        try:
            part = os.read(leader, 65536)
        except OSError:  # What Linux says when the other side is closed.
            break
        if not part:
            break
        read += part
    os.close(leader)
    assert process.wait(timeout=120) == 0
    return read.decode()


def test_a_terminal_gets_bars_with_rate_time_left_loss_and_uwa() -> None:
    seen = run_script(in_terminal=True)
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen)
    assert plain != seen
    last = [line for line in re.split(r"[\r\n]+", plain) if line.startswith("afcl encoder")][-1]
    for text in ("epoch 2/2", " images/s", "loss 0.5000", "balanced accuracy 0.750", "0:00:00"):
        assert text in last
    assert "checking images" in plain
    assert "12/12" in plain
    assert "afcl: warning: Features are not cached: few [images] of dog" in plain


def test_a_pipe_gets_plain_lines() -> None:
    lines = run_script(in_terminal=False).splitlines()
    assert lines[0].startswith("afcl: encoder 1/2: loss 1.5000, balanced accuracy 0.750, ")
    assert re.fullmatch(
        r"afcl: encoder 2/2: loss 0\.5000, balanced accuracy 0\.750, [\d,]+ images/s, 0:00 left", lines[1]
    )
    assert lines[2:] == ["afcl: warning: Features are not cached: few [images] of dog"]


def test_quiet_keeps_warnings_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.reporter(quiet=True) as watcher:
        assert watcher.counting("checking") is None
        watcher.fact(notes.fixed_steps(9))
        watcher.stage("encoder", 2, 4)
        watcher.step(1.0, 128)
        watcher.epoch(1, {"loss": 1.0})
        watcher.fact(cautions.not_cached("a warning"))
    assert capsys.readouterr() == ("", "warning: Features are not cached: a warning\n")


def test_the_time_left_counts_only_epochs_of_this_process(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    lines = progress.Lines()
    lines.stage("encoder", 10, 4)
    now = 30.0
    lines.epoch(8, {"loss": 1.0})
    assert capsys.readouterr().err.endswith("1:00 left\n")


def test_a_count_is_told_every_few_seconds(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    tell = progress.Lines().counting("checking images")
    assert tell is not None
    for done in range(1, 2001):
        now = done / 100
        tell(done, 2000)
    told = capsys.readouterr().err.splitlines()
    assert told[0] == "checking images: 500 of 2,000, 100/s, 0:15 left"
    assert len(told) == 4


@pytest.mark.parametrize("in_terminal", [False, True])
def test_a_warning_cannot_steer_the_terminal(in_terminal: bool) -> None:
    assert "few \x1b]0;" not in run_script(in_terminal, "few \x1b]0;title\x07 of dog")
    assert "few \N{REPLACEMENT CHARACTER}]0;title\N{REPLACEMENT CHARACTER} of dog" in run_script(
        in_terminal, "few \x1b]0;title\x07 of dog"
    )


def test_a_long_epoch_prints_a_line_a_minute_and_a_short_one_none(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    lines = progress.Lines()
    lines.stage("encoder", 3, 100)
    for step in range(1, 101):
        now = 1.5 * step
        lines.step(2.5, 8)
    lines.epoch(1, {"loss": 2.5})
    for step in range(1, 101):
        now = 150 + 0.5 * step
        lines.step(1.5, 8)
    lines.epoch(2, {"loss": 1.5})
    now = 260.0
    lines.step(1.0, 8)
    told = capsys.readouterr().err.splitlines()
    assert told[:2] == [
        "encoder: 320 images so far, loss 2.5000, 5 images/s",
        "encoder: 640 images so far, loss 2.5000, 5 images/s",
    ]
    assert told[2].startswith("encoder 1/3: loss 2.5000")
    assert told[3].startswith("encoder 2/3: loss 1.5000")
    assert told[4:] == ["encoder 3/3: 8 images so far, loss 1.0000, 6 images/s"]


def test_a_line_is_one_write_so_that_a_log_holds_no_half_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    from lopsided.cli.output import say

    class Pipe(io.StringIO):
        def write(self, text: str) -> int:
            writes.append(text)
            return super().write(text)

    writes: list[str] = []
    monkeypatch.setattr(sys, "stderr", Pipe())
    progress.Lines().fact(notes.tracked(["mlflow"]))
    progress.Told().fact(cautions.not_cached("why"))
    say("a word")
    assert writes == ["Tracked by mlflow.\n", "warning: Features are not cached: why\n", "a word\n"]


def test_how_a_run_works_is_printed_for_those_who_ask(capsys: pytest.CaptureFixture[str]) -> None:
    for verbose, words in ((False, ""), (True, f"{notes.given_strength(0.1)}\n")):
        with progress.reporter(verbose=verbose) as watcher:
            watcher.fact(notes.given_strength(0.1))
        assert capsys.readouterr().err == words


def test_a_notebook_gets_one_bar_per_stage_that_is_drawn_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pages: list[list[str]] = []

    class Handle:
        def __init__(self, page: str) -> None:
            self.drawn = [page]
            pages.append(self.drawn)

        def update(self, page: str) -> None:
            self.drawn.append(page)

    page = types.ModuleType("IPython.display")
    page.HTML = str  # type: ignore[attr-defined]
    page.display = lambda content, display_id: Handle(content)  # type: ignore[attr-defined]
    notebook = types.ModuleType("IPython")
    notebook.get_ipython = lambda: types.SimpleNamespace(kernel=object())  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", notebook)
    monkeypatch.setitem(sys.modules, "IPython.display", page)
    with progress.reporter() as watcher:
        tell = watcher.counting("checking <images>")
        assert tell is not None
        tell(3, 12)
        tell(12, 12)
        watcher.stage("encoder", 2, 4)
        watcher.step(1.5, 128)
        watcher.epoch(2, {"loss": 0.5, "val_uwa": 0.75})
        watcher.fact(cautions.not_cached("no room"))
    images, encoder = pages
    assert "checking &lt;images&gt; <progress value=3 max=12></progress>" in images[0]
    assert "<progress value=12 max=12></progress> 12 of 12" in images[-1]
    assert "epoch 2/2, loss 0.5000, balanced accuracy 0.750" in encoder[-1]
    err = capsys.readouterr().err
    assert "no room" in err
    assert "epoch" not in err
    with progress.reporter(quiet=True) as watcher:
        assert watcher.counting("checking images") is None
