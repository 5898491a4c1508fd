from __future__ import annotations

import io

import pytest
from rich.console import Console

from lopsided.recipe import Recipe
from lopsided.runs import progress
from lopsided.runs import view as views
from lopsided.runs.plan import Cell
from lopsided.runs.records import Failure
from lopsided.runs.view import Lines, Screen, Told, View, sweep_view
from tiny_sweep import record_of

CELLS = [
    Cell.of(
        Recipe().override(
            seed=seed,
            **{
                "data.source": "fashion-mnist-tops",
                "data.scenario": "90:10",
                "encoder_training.loss.gamma": 7.0,
            },
        )
    )
    for seed in range(20)
]
NAME = "90:10 AFCL(gamma=7) seed"


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(views.time, "monotonic", clock)
    return clock


def test_a_pipe_gets_a_line_per_finished_cell_with_its_name_its_uwa_and_the_time_left(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    view = Lines()
    view.begin(12, 2)
    view.started(CELLS[0])
    view.started(CELLS[1])
    clock.now += 600
    view.finished(record_of(CELLS[0].recipe, 0.7312))
    view.failed(Failure.of(CELLS[1].recipe, "no room."), again=True)
    view.failed(Failure.of(CELLS[1].recipe, "no room."), again=False)
    clock.now += 600
    view.started(CELLS[2])
    view.finished(record_of(CELLS[2].recipe, 0.5))
    assert capsys.readouterr().err.splitlines() == [
        "2/12 done, 2 skipped",
        f"{NAME} 0: balanced accuracy 0.731 (3/12 done, 1 running, 2 skipped, 6.0 runs/h, 1:30:00 left)",
        f"{NAME} 1 is tried again: no room.",
        f"{NAME} 1 failed: no room.",
        f"{NAME} 2: balanced accuracy 0.500 (4/12 done, 1 failed, 2 skipped, 6.0 runs/h, 1:10:00 left)",
    ]


def test_while_no_cell_ends_a_pipe_gets_a_line_now_and_then(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    view = Lines()
    view.begin(2, 0)
    view.started(CELLS[0])
    for _ in range(70):
        clock.now += 1
        view.tick()
    for _ in range(40):
        clock.now += 1
        view.waiting(2, "in use by process 1.")
        view.tick()
    assert capsys.readouterr().err.splitlines() == [
        "0/2 done",
        "0/2 done, 1 running",
        "0/2 done, 1 running",
        "waiting for 2 cells of other processes: in use by process 1.",
        "waiting for 2 cells of other processes: in use by process 1.",
    ]


def shown(screen: Screen) -> list[str]:
    console = Console(file=io.StringIO(), width=100)
    console.print(screen.draw())
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def test_a_terminal_shows_counts_pace_and_running_cells(clock: Clock) -> None:
    screen = Screen()
    screen.begin(20, 1)
    for cell in CELLS[:12]:
        screen.started(cell)
    clock.now += 90
    screen.finished(record_of(CELLS[0].recipe))
    lines = shown(screen)
    assert lines[0].endswith(" 2/20 done, 11 running, 1 skipped, 40 runs/h, 27:00 left")
    assert lines[1] == f"  {NAME} 1, 1:30"
    assert len(lines) == 1 + views.SHOWN + 1
    assert lines[-1] == "  and 3 more"


def test_a_terminal_shows_what_is_waited_for_until_a_cell_starts(clock: Clock) -> None:
    screen = Screen()
    screen.begin(2, 1)
    screen.waiting(1, "in use by \x1b process 1.")
    assert shown(screen)[1] == (
        "  waiting for 1 cell of other processes: in use by \N{REPLACEMENT CHARACTER} process 1."
    )
    screen.started(CELLS[0])
    assert shown(screen)[1:] == [f"  {NAME} 0, 0:00"]


def test_what_happened_scrolls_by_above_the_bar(capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen()
    with screen.live:
        screen.begin(2, 0)
        screen.finished(record_of(CELLS[0].recipe))
        screen.failed(Failure.of(CELLS[1].recipe, "no [bold] room."), again=False)
    told = [line.rstrip() for line in capsys.readouterr().err.splitlines()]
    assert f"{NAME} 0: balanced accuracy 0.750" in told
    assert f"{NAME} 1 failed: no [bold] room." in told


def test_a_terminal_says_in_full_what_it_waits_for(capsys: pytest.CaptureFixture[str]) -> None:
    reason = f"If that process has ended, remove {'/a/long/path' * 12}/.lock."
    screen = Screen()
    with screen.live:
        screen.begin(2, 0)
        screen.waiting(1, reason)
        screen.waiting(1, reason)
    told = "".join(line.rstrip() for line in capsys.readouterr().err.splitlines()).replace(" ", "")
    assert told.count(reason.replace(" ", "")) == 1


def test_quiet_says_failures_notes_and_what_is_waited_for_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with sweep_view(quiet=True) as view:
        view.begin(2, 0)
        view.started(CELLS[0])
        view.finished(record_of(CELLS[0].recipe))
        view.tick()
        view.waiting(1, "held, remove it.")
        view.waiting(1, "held, remove it.")
        view.note("A line was cut off.")
        view.failed(Failure.of(CELLS[1].recipe, "no \x1b room."), again=False)
    assert capsys.readouterr() == (
        "",
        "waiting for 1 cell of other processes: held, remove it.\n"
        f"A line was cut off.\n{NAME} 1 failed: no \N{REPLACEMENT CHARACTER} room.\n",
    )


@pytest.mark.parametrize(
    ("terminal", "quiet", "kind"), [(True, False, Screen), (False, False, Lines), (True, True, Told)]
)
def test_the_view_fits_whoever_is_watching(
    monkeypatch: pytest.MonkeyPatch, terminal: bool, quiet: bool, kind: type[View]
) -> None:
    monkeypatch.setattr(progress, "in_terminal", lambda: terminal)
    with sweep_view(quiet=quiet) as view:
        assert type(view) is kind
