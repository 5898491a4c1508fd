from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from concurrent import futures
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lopsided import files
from lopsided.errors import InputError, RunError
from lopsided.recipe import Recipe
from lopsided.runs import driver
from lopsided.runs.driver import Outcome
from lopsided.runs.engines import LOST
from lopsided.runs.engines.local import LocalEngine
from lopsided.runs.folder import Run
from lopsided.runs.plan import Cell
from lopsided.runs.records import Failure, Record, append_failure, append_records, read_failures, read_records
from lopsided.runs.run import run_recipe
from lopsided.runs.sweep import about_sweep, open_sweep, record_missing, run_sweep
from made_runs import make_run
from tiny_command import environment, names_below
from tiny_sweep import Heard, Scripted, is_alive, record_of, tiny_recipe, wait_until


@pytest.fixture
def cells(photos: Path) -> list[Recipe]:
    return [tiny_recipe(photos, seed=seed) for seed in range(4)]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "_POLL_SECONDS", 0.0)


def key(recipe: Recipe) -> str:
    return Cell.of(recipe).key


def seeds(outcome: Outcome) -> list[int]:
    return [record.seed for record in outcome.done]


# What the sweep does, whatever computes its cells.


def test_every_cell_is_trained_once_and_recorded(cells: list[Recipe], tmp_path: Path) -> None:
    engine, view = Scripted(), Heard()
    outcome = run_sweep([*cells, cells[0]], tmp_path, engine=engine, view=view)
    assert outcome == Outcome([record_of(recipe) for recipe in cells], [], 0)
    assert engine.submitted == [0, 1, 2, 3]
    assert engine.most == engine.slots
    assert engine.closed
    assert read_records(tmp_path / "records.jsonl") == (outcome.done, [])
    assert (view.numbers, view.uwas) == ((4, 0), [0.75] * 4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cells", "records.jsonl", "sweep.json"]
    assert {path.name for path in (tmp_path / "cells").iterdir()} == set(map(key, cells))


def test_what_does_not_decide_the_outcome_makes_no_other_cell(cells: list[Recipe], tmp_path: Path) -> None:
    run_sweep(cells, tmp_path, engine=Scripted())
    engine = Scripted()
    again = [recipe.override(threads=7, description="again") for recipe in cells]
    assert run_sweep(again, tmp_path, engine=engine).skipped == 4
    assert engine.submitted == []


def test_starting_again_skips_what_is_done_and_adding_only_adds(
    cells: list[Recipe], photos: Path, tmp_path: Path
) -> None:
    run_sweep(cells[1:3], tmp_path, engine=Scripted())
    engine, view = Scripted(), Heard()
    outcome = run_sweep(cells, tmp_path, engine=engine, view=view)
    assert engine.submitted == [0, 3]
    assert (seeds(outcome), outcome.skipped, view.numbers) == ([0, 1, 2, 3], 2, (4, 2))
    assert len((tmp_path / "records.jsonl").read_text().splitlines()) == 4


def test_a_failing_cell_is_recorded_and_the_others_go_on(cells: list[Recipe], tmp_path: Path) -> None:
    engine, view = Scripted({1: ["eta must be >= 0, got -3.0."]}), Heard()
    outcome = run_sweep(cells, tmp_path, engine=engine, view=view)
    failure = Failure.of(Cell.of(cells[1]).recipe, "eta must be >= 0, got -3.0.")
    assert (seeds(outcome), outcome.failed, view.failures) == ([0, 2, 3], [failure], [(failure, False)])
    assert read_failures(tmp_path / "failures.jsonl") == [failure]
    assert engine.submitted == [0, 1, 2, 3]
    again = run_sweep(cells, tmp_path, engine=engine)
    assert (seeds(again), again.failed, again.skipped) == ([0, 1, 2, 3], [], 3)
    assert read_failures(tmp_path / "failures.jsonl") == [failure]


@pytest.mark.parametrize("retries", [0, 1, 2])
def test_a_cell_whose_worker_dies_is_tried_again_and_then_given_up(
    cells: list[Recipe], tmp_path: Path, retries: int
) -> None:
    engine, view = Scripted({1: ["died"] * 9, 2: ["died"] * retries}, slots=1), Heard()
    outcome = run_sweep(cells, tmp_path, engine=engine, view=view, retries=retries)
    assert seeds(outcome) == [0, 2, 3]
    assert [failure.seed for failure in outcome.failed] == [1]
    assert engine.submitted == [0, *[1] * (retries + 1), *[2] * (retries + 1), 3]
    assert [again for _, again in view.failures] == [True] * retries + [False] + [True] * retries
    assert [failure.error for failure in read_failures(tmp_path / "failures.jsonl")] == [LOST] * (2 * retries + 1)


@pytest.mark.parametrize(
    ("keeping", "left"),
    [
        ({}, ["log.jsonl", "metrics.json"]),
        (
            {"keep_models": True},
            ["checkpoint/state.safetensors", "log.jsonl", "metrics.json", "model.json", "model.safetensors"],
        ),
    ],
)
def test_what_is_kept_of_a_finished_cell(
    cells: list[Recipe], tmp_path: Path, keeping: dict[str, Any], left: list[str]
) -> None:
    engine = Scripted()
    run_sweep(cells[:1], tmp_path, engine=engine, **keeping)
    assert names_below(tmp_path / "cells" / key(cells[0])) == left
    assert engine.models == ("keep_models" in keeping)
    run_sweep(cells[:1], tmp_path, engine=Scripted())  # What was kept stays when nothing is left to do.
    assert names_below(tmp_path / "cells" / key(cells[0])) == left


def test_a_run_that_was_finished_but_not_recorded_is_recorded(cells: list[Recipe], tmp_path: Path) -> None:
    run = run_recipe(cells[0], tmp_path / "run")
    open_sweep(tmp_path / "sweep")
    folder = tmp_path / "sweep" / "cells" / key(cells[0])
    shutil.copytree(run.folder, folder)
    engine = Scripted()
    outcome = run_sweep(cells[:2], tmp_path / "sweep", engine=engine)
    assert engine.submitted == [1]
    assert (seeds(outcome), outcome.skipped) == ([0, 1], 1)
    assert run.metrics is not None
    assert outcome.done[0].test.images == run.metrics["test"]["num_images"]
    assert not (folder / "model.safetensors").exists()


def test_records_that_are_lost_are_read_from_the_run_folders_again(cells: list[Recipe], tmp_path: Path) -> None:
    folder = open_sweep(tmp_path / "sweep")
    expected = [Record.from_run(run_recipe(recipe, folder / "cells" / key(recipe))) for recipe in cells[:3]]
    path = folder / "records.jsonl"
    gone = record_of(cells[3])
    path.write_text(f"{gone.to_json()}\n")
    (folder / "cells" / key(cells[2]) / "recipe.toml").unlink()  # What cannot be read stays out.
    assert record_missing(folder) == 2
    assert {record.cell: record for record in read_records(path)[0]} == {r.cell: r for r in (gone, *expected[:2])}
    assert record_missing(folder) == 0
    path.unlink()
    engine = Scripted()
    outcome = run_sweep(cells[1:2], folder, engine=engine)
    assert (engine.submitted, outcome.done) == ([], [expected[1]])
    assert {record.cell for record in read_records(path)[0]} == {expected[0].cell, expected[1].cell}


def test_records_and_failures_bear_the_name_of_their_method(cells: list[Recipe], tmp_path: Path) -> None:
    engine = Scripted({1: ["it broke."]})
    outcome = run_sweep([Cell.of(recipe, f"method {i}") for i, recipe in enumerate(cells[:2])], tmp_path, engine=engine)
    assert [record.compared_as for record in outcome.done] == ["method 0"]
    assert outcome.failed[0].name == "all images method 1 seed 1"
    assert read_records(tmp_path / "records.jsonl")[0] == outcome.done


def test_a_sweep_says_what_it_is_about_and_keeps_other_kinds_out(cells: list[Recipe], tmp_path: Path) -> None:
    engine = Scripted()
    run_sweep(cells[:1], tmp_path, engine=engine)
    assert about_sweep(tmp_path).get("kind") is None  # Whoever comes first says.
    run_sweep(cells[:1], tmp_path, engine=engine, about={"kind": "compare", "methods": ["a"]})
    run_sweep(cells[:1], tmp_path, engine=engine, about={"kind": "compare", "methods": ["a", "b"]})
    run_sweep(cells[:1], tmp_path, engine=engine)
    assert about_sweep(tmp_path)["methods"] == ["a", "b"]
    told = r"contains a sweep of `lopsided compare`, not of `lopsided reproduce`\. Choose another"
    with pytest.raises(RunError, match=told):
        run_sweep(cells, tmp_path, engine=engine, about={"kind": "reproduce"})
    assert engine.submitted == [0]


@pytest.mark.parametrize(
    "changes", [{"seconds": 10**400}, {"seconds": -5.0}, {"counts": [1]}, {"lopsided": "\ud800"}, {"environment": {}}]
)
def test_a_finished_run_of_odd_figures_is_never_written_down_and_keeps_no_other_out(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    folder = open_sweep(tmp_path / "sweep")
    for seed, odd in ((0, changes), (1, {})):
        run = Run.open(make_run(tmp_path / str(seed), pictures=False, features=False, recipe={"seed": seed}, **odd))
        (folder / "cells").mkdir(exist_ok=True)
        run.folder.rename(folder / "cells" / key(run.recipe))
    recipes = [Run.open(path).recipe for path in (folder / "cells").iterdir()]
    assert record_missing(folder) == 1
    assert [record.seed for record in read_records(folder / "records.jsonl")[0]] == [1]
    (folder / "records.jsonl").unlink()
    engine = Scripted({0: ["it cannot be recorded"]})
    outcome = run_sweep(recipes, folder, engine=engine)
    assert (engine.submitted, seeds(outcome), len(outcome.failed)) == ([0], [1], 1)
    assert len(read_records(folder / "records.jsonl")[0]) == 1


def test_a_results_file_cut_in_half_costs_no_run(cells: list[Recipe], tmp_path: Path) -> None:
    run_sweep(cells, tmp_path, engine=Scripted())
    path = tmp_path / "records.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    engine, view = Scripted(), Heard()
    assert seeds(run_sweep(cells, tmp_path, engine=engine, view=view)) == [0, 1, 2, 3]
    assert engine.submitted == [3]
    said = f"Skipped the last line of {path}: it is incomplete."
    assert view.notes == [said]
    assert path.read_bytes() == whole


def test_a_folder_of_other_content_is_refused_and_left_alone(cells: list[Recipe], tmp_path: Path) -> None:
    (tmp_path / "thesis.doc").write_text("")
    with pytest.raises(RunError, match=r"contains other files and no sweep\. Choose a new or empty folder\.$"):
        run_sweep(cells, tmp_path, engine=Scripted())
    assert names_below(tmp_path) == ["thesis.doc"]
    with pytest.raises(RunError, match=r"thesis\.doc is a file\. Choose a folder for the sweep\.$"):
        run_sweep(cells, tmp_path / "thesis.doc", engine=Scripted())


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (
            '{"format": 2, "lopsided": "9.1"}',
            r"^a sweep must have format 1, got format 2 in .* with lopsided 9\.1, whic",
        ),
        ("{", r"sweep\.json cannot be read \(.*\)\. Restore the file, or replace its content by {\"format\": 1}\.$"),
        ("[1]", r"sweep\.json cannot be read \("),
        ("{}", r"sweep\.json cannot be read \(no 'format'\)"),
    ],
)
def test_a_sweep_of_another_kind_is_refused(cells: list[Recipe], tmp_path: Path, content: str, sentence: str) -> None:
    (tmp_path / "sweep.json").write_text(content)
    with pytest.raises(RunError, match=sentence):
        run_sweep(cells, tmp_path, engine=Scripted())
    assert names_below(tmp_path) == ["sweep.json"]


# Two sweeps in one folder.


class Elsewhere:
    """Another process that has a cell; ``Scripted.before_wait`` lets it go on."""

    def __init__(self, folder: Path, recipe: Recipe, then: Callable[[], object], *, turns: int = 6) -> None:
        self.stack, self.then, self.turns = ExitStack(), then, turns
        self.stack.enter_context(files.lock(open_sweep(folder) / "claims" / key(recipe)))

    def __call__(self) -> None:
        self.turns -= 1
        if self.turns == 0:
            self.then()
            self.stack.close()


@pytest.mark.slow
def test_a_cell_that_is_computed_elsewhere_is_left_to_the_last_and_taken_when_it_is_free(
    cells: list[Recipe], tmp_path: Path, quick: None
) -> None:
    engine, view = Scripted(), Heard()
    engine.before_wait = Elsewhere(tmp_path, cells[0], lambda: None)
    outcome = run_sweep(cells, tmp_path, engine=engine, view=view)
    assert engine.submitted == [1, 2, 3, 0]
    assert seeds(outcome) == [0, 1, 2, 3]
    assert view.reasons[0].endswith(f"in use by process {os.getpid()} on {os.uname().nodename}. Wait for it to end.")


def test_a_claim_of_another_machine_that_gives_no_sign_is_taken_over(
    cells: list[Recipe], tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "STALE_SECONDS", 0.05)
    left = open_sweep(tmp_path) / "claims" / key(cells[1]) / files.LOCK_NAME
    left.parent.mkdir(parents=True)
    left.write_text('{"pid": 1, "host": "elsewhere"}')
    assert seeds(run_sweep(cells, tmp_path, engine=Scripted())) == [0, 1, 2, 3]
    assert not left.exists()


def test_two_sweeps_may_make_one_folder_at_once(
    cells: list[Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, read = tmp_path / "sweep", Path.read_bytes

    def read_too_early(path: Path) -> bytes:
        if path.name == "sweep.json" and not path.exists():
            monkeypatch.undo()
            run_sweep(cells[:1], folder, engine=Scripted())  # All that another process does in between.
            raise FileNotFoundError(path)
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", read_too_early)
    assert seeds(run_sweep(cells, folder, engine=Scripted())) == [0, 1, 2, 3]


def test_an_engine_that_cannot_be_opened_leaves_no_folder_and_no_mark_behind(
    cells: list[Recipe], tmp_path: Path
) -> None:
    class NoCluster(Scripted):
        def open(self, folder: Path, *, models: bool = False) -> None:
            raise InputError("there must be a cluster.")

    for folder in (tmp_path / "deep" / "sweep", tmp_path):
        with pytest.raises(InputError, match="cluster"):
            run_sweep(cells, folder, engine=NoCluster())
        assert list(tmp_path.iterdir()) == []
    run_sweep(cells[:1], tmp_path, engine=Scripted())
    before = names_below(tmp_path)
    with pytest.raises(InputError, match="cluster"):
        run_sweep(cells, tmp_path, engine=NoCluster())
    assert names_below(tmp_path) == before


@pytest.mark.slow
def test_a_cell_that_was_done_elsewhere_is_not_trained_twice(cells: list[Recipe], tmp_path: Path, quick: None) -> None:
    engine = Scripted()
    engine.before_wait = Elsewhere(
        tmp_path, cells[0], lambda: append_records(tmp_path / "records.jsonl", record_of(cells[0], 0.5))
    )
    outcome = run_sweep(cells, tmp_path, engine=engine)
    assert engine.submitted == [1, 2, 3]
    assert [record.test.uwa for record in outcome.done] == [0.5, 0.75, 0.75, 0.75]
    assert outcome.skipped == 0
    assert len((tmp_path / "records.jsonl").read_text().splitlines()) == 4


@pytest.mark.slow
def test_a_cell_that_failed_elsewhere_meanwhile_is_not_tried_twice(
    cells: list[Recipe], tmp_path: Path, quick: None
) -> None:
    failure = Failure.of(Cell.of(cells[0]).recipe, "no.")
    engine = Scripted()
    engine.before_wait = Elsewhere(tmp_path, cells[0], lambda: append_failure(tmp_path / "failures.jsonl", failure))
    assert run_sweep(cells, tmp_path, engine=engine).failed == [failure]
    assert engine.submitted == [1, 2, 3]


@pytest.mark.slow
def test_a_cell_whose_worker_was_lost_elsewhere_is_taken(cells: list[Recipe], tmp_path: Path, quick: None) -> None:
    failure = Failure.of(Cell.of(cells[0]).recipe, LOST)
    engine = Scripted()
    engine.before_wait = Elsewhere(tmp_path, cells[0], lambda: append_failure(tmp_path / "failures.jsonl", failure))
    assert seeds(run_sweep(cells, tmp_path, engine=engine)) == [0, 1, 2, 3]


def test_a_lost_cell_waits_until_its_folder_is_free(cells: list[Recipe], tmp_path: Path, quick: None) -> None:
    engine, dying = Scripted({0: ["died"]}), ExitStack()

    def live_on_for_a_while() -> None:
        if engine.submitted == [0, 1]:
            dying.enter_context(files.lock(tmp_path / "cells" / key(cells[0])))
        elif not engine.running:
            assert engine.submitted == [0, 1, 2, 3]
            dying.close()

    engine.before_wait = live_on_for_a_while
    assert seeds(run_sweep(cells, tmp_path, engine=engine)) == [0, 1, 2, 3]
    assert engine.submitted == [0, 1, 2, 3, 0]


def test_a_cell_whose_folder_another_process_uses_is_left_to_the_last(
    cells: list[Recipe], tmp_path: Path, quick: None
) -> None:
    engine, holding = Scripted(), ExitStack()
    holding.enter_context(files.lock(open_sweep(tmp_path) / "cells" / key(cells[0])))
    engine.before_wait = lambda: engine.submitted == [1, 2, 3] and holding.close()
    assert seeds(run_sweep(cells, tmp_path, engine=engine)) == [0, 1, 2, 3]
    assert engine.submitted == [1, 2, 3, 0]


def test_the_cells_of_an_interrupted_sweep_are_free_again(cells: list[Recipe], tmp_path: Path) -> None:
    engine = Scripted()

    def interrupt() -> None:
        assert len(list((tmp_path / "claims").iterdir())) == 2
        with pytest.raises(RunError, match="in use by"), files.lock(tmp_path / "claims" / key(cells[0])):
            pass
        raise KeyboardInterrupt

    engine.before_wait = interrupt
    with pytest.raises(KeyboardInterrupt):
        run_sweep(cells, tmp_path, engine=engine)
    assert engine.closed
    assert not (tmp_path / "claims").exists()
    assert seeds(run_sweep(cells, tmp_path, engine=Scripted())) == [0, 1, 2, 3]


def test_sigterm_does_what_an_interrupt_does_while_a_sweep_runs(cells: list[Recipe], tmp_path: Path) -> None:
    engine = Scripted()
    engine.before_wait = lambda: os.kill(os.getpid(), signal.SIGTERM)
    handled: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: handled.append(number))
    try:
        with pytest.raises(KeyboardInterrupt):
            run_sweep(cells, tmp_path, engine=engine)
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert engine.closed
    assert handled == [signal.SIGTERM] * 2  # The handler of the program knows what ended the sweep.


def test_a_sweep_runs_beside_the_main_thread(cells: list[Recipe], tmp_path: Path) -> None:
    done: list[Outcome] = []
    thread = threading.Thread(target=lambda: done.append(run_sweep(cells, tmp_path, engine=Scripted())))
    thread.start()
    thread.join()
    assert seeds(done[0]) == [0, 1, 2, 3]


# Worker processes.


def test_there_is_a_worker_of_one_thread_for_each_core_that_may_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 3, 5}, raising=False)
    assert (LocalEngine().slots, LocalEngine().threads) == (3, 1)
    assert [LocalEngine(threads=threads).slots for threads in (2, 3, 4)] == [1, 1, 1]
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    assert [LocalEngine(threads=threads).slots for threads in (2, 3, 4)] == [4, 2, 2]
    assert LocalEngine(5, threads=4).slots == 5


def test_workers_and_threads_must_be_some() -> None:
    with pytest.raises(InputError, match=r"^workers must be >= 1, got 0\.$"):
        LocalEngine(0)
    with pytest.raises(InputError, match=r"^threads must be >= 1, got -1\.$"):
        LocalEngine(1, -1)


def workers_of(folder: Path) -> dict[str, int]:
    """The process that trains each cell, of those that have a checkpoint by now."""
    pids = {}
    try:  # The folders are just being made, and glob may look for one between its name and its content.
        paths = list(folder.glob("cells/*/checkpoint/state.safetensors"))
    except FileNotFoundError:
        return {}
    for path in paths:
        lock = path.parents[1] / files.LOCK_NAME
        if lock.exists() and (content := lock.read_text()):
            pids[lock.parent.name] = int(json.loads(content)["pid"])
    return pids


def events_of(folder: Path, recipe: Recipe, *names: str) -> list[str]:
    run = Run.open(folder / "cells" / key(recipe))
    return [event["event"] for event in run.events() if event["event"] in names]


def timeless(record: Record) -> Record:
    return replace(record, seconds=0.0)


def trained_here(cells: list[Recipe], folder: Path) -> list[Record]:
    """The records of the same cells, trained one after the other in this process."""
    runs = [run_recipe(recipe.override(threads=1), folder / str(recipe.seed)) for recipe in cells]
    return [timeless(Record.from_run(run)) for run in runs]


@pytest.mark.slow
def test_a_worker_that_is_killed_takes_no_other_cell_along_and_its_own_goes_on(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = [tiny_recipe(photos, 30, seed=seed) for seed in range(2)]
    bad = tiny_recipe(photos, **{"data.scenario": "10:90,total=100"})
    killed: list[str] = []
    environments: list[str] = []

    def kill() -> None:
        pids = wait_until(lambda: workers_of(tmp_path))
        cell, pid = next(iter(pids.items()))
        environments.append(Path(f"/proc/{pid}/environ").read_text())
        os.kill(pid, signal.SIGKILL)
        killed.append(cell)

    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    killer = threading.Thread(target=kill)
    killer.start()
    view = Heard()
    outcome = run_sweep([*cells, bad], tmp_path, engine=LocalEngine(2, threads=1), view=view)
    killer.join()
    assert seeds(outcome) == [0, 1]
    assert [record.threads for record in outcome.done] == [1, 1]
    assert "OMP_NUM_THREADS=1" in environments[0].split("\0")  # Seen by torch when it is imported.
    assert os.environ["OMP_NUM_THREADS"] == "3"
    assert [(failure.cell, again) for failure, again in view.failures if again] == [(killed[0], True)]
    for recipe in cells:
        expected = ["start", "resume"] if key(recipe) == killed[0] else ["start"]
        assert events_of(tmp_path, recipe, "start", "resume") == expected
    assert [failure.error for failure in outcome.failed] == [
        "10:90,total=100 needs cat 10, dog 90, but the source has cat 20, dog 10. "
        "Use a smaller total or another proportion."
    ]
    assert list(map(timeless, outcome.done)) == trained_here(cells, tmp_path / "here")


DRIVER = """
    import sys
    from lopsided.runs.engines.local import LocalEngine
    from lopsided.runs.sweep import run_sweep
    from lopsided.runs.view import sweep_view
    from lopsided.recipe import Recipe

    folder, workers, *recipes = sys.argv[1:]
    try:
        with sweep_view() as view:
            run_sweep([Recipe.load(recipe) for recipe in recipes], folder, engine=LocalEngine(int(workers)), view=view)
    except KeyboardInterrupt:
        sys.exit(130)
"""


def start_driver(folder: Path, workers: int, cells: list[Recipe]) -> subprocess.Popen[str]:
    paths = []
    for recipe in cells:
        paths.append(folder.parent / f"{recipe.seed}.toml")
        paths[-1].write_text(recipe.to_toml())
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(DRIVER), str(folder), str(workers), *map(str, paths)],
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509  It takes no lock.
    )


@pytest.mark.slow
@pytest.mark.parametrize(("number", "workers"), [(signal.SIGINT, 1), (signal.SIGTERM, 1), (signal.SIGKILL, 2)])
def test_workers_end_with_their_sweep_however_it_ends_and_their_cells_go_on_later(
    photos: Path, tmp_path: Path, number: signal.Signals, workers: int
) -> None:
    cells = [tiny_recipe(photos, 100_000, seed=seed) for seed in range(workers)]
    folder = tmp_path / "sweep"
    driver = start_driver(folder, workers, cells)
    pids = wait_until(lambda: len(found := workers_of(folder)) == workers and found)
    if number == signal.SIGINT:
        os.killpg(driver.pid, number)  # A terminal interrupts all processes of the command.
    else:
        os.kill(driver.pid, number)
    told = driver.communicate(timeout=120)[1]
    assert driver.returncode == (-9 if number == signal.SIGKILL else 130)
    assert "Traceback" not in told
    assert "failed" not in told
    for pid in pids.values():
        wait_until(lambda pid=pid: not is_alive(pid))
    if number == signal.SIGTERM:
        again = start_driver(folder, workers, cells)
        for recipe in cells:
            wait_until(lambda recipe=recipe: events_of(folder, recipe, "start", "resume") == ["start", "resume"])
        again.kill()
        again.communicate(timeout=120)


@pytest.mark.slow
def test_impatient_interrupts_while_a_worker_starts_print_no_traceback_either(photos: Path, tmp_path: Path) -> None:
    driver = start_driver(tmp_path / "sweep", 1, [tiny_recipe(photos)])
    children = Path(f"/proc/{driver.pid}/task/{driver.pid}/children")

    def listening() -> bool:
        """Whether the worker's Python is up far enough to make an exception of an interrupt."""
        for pid in children.read_text().split():
            status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
            command = Path(f"/proc/{pid}/cmdline").read_text()
            if "spawn_main" in command and int(status["SigCgt"], 16) >> (signal.SIGINT - 1) & 1:
                return True
        return False

    wait_until(listening)
    for _ in range(3):
        os.killpg(driver.pid, signal.SIGINT)
        time.sleep(0.1)
    told = driver.communicate(timeout=120)[1]
    assert driver.returncode in (
        130,
        -signal.SIGINT,
    )  # The last one may come when Python ends. A shell shows 130 for both.
    assert told.splitlines() == ["0/1 done"]


def test_an_interrupt_that_another_thread_receives_waits_until_the_worker_is_known(
    photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def receive() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # As threads of BLAS, which began before.
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)

    class Pool:
        def submit(self, *_: object) -> futures.Future[tuple[str, str]]:
            thread = threading.Thread(target=receive)
            thread.start()
            thread.join()
            return futures.Future()

    engine = LocalEngine(1)
    pool = Pool()
    monkeypatch.setattr(engine, "_new_pool", lambda: pool)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # It is ignored in the background.
    try:
        with pytest.raises(KeyboardInterrupt):
            engine.submit(Cell.of(tiny_recipe(photos)))
    finally:
        signal.signal(signal.SIGINT, before)
    assert [each for _, each in engine._running.values()] == [pool]


@pytest.mark.slow
def test_two_sweeps_started_by_mistake_on_one_folder_share_its_cells(photos: Path, tmp_path: Path) -> None:
    cells = [tiny_recipe(photos, 10, seed=seed) for seed in range(5)]
    folder = tmp_path / "sweep"
    drivers = [start_driver(folder, 1, cells) for _ in range(2)]
    told = [driver.communicate(timeout=240)[1] for driver in drivers]
    assert [driver.returncode for driver in drivers] == [0, 0], told
    records, notes = read_records(folder / "records.jsonl")
    assert sorted(record.seed for record in records) == [0, 1, 2, 3, 4]
    assert notes == []
    for recipe in cells:
        assert events_of(folder, recipe, "start", "resume") == ["start"]
    for text in told:
        assert "5/5 done" in text.splitlines()[-1]
    assert not (folder / "failures.jsonl").exists()
    found = sorted(map(timeless, records), key=lambda record: record.seed)
    assert found == trained_here(cells, tmp_path / "here")
