"""What is lost when the command is killed? SIGKILL at random moments and at every write, and the same command again.

    python benchmarks/kill.py       prints what happened and writes records/kill.json (half an hour of two cores)
    python benchmarks/kill.py --only fit,fit-writes     a part of it; what the record says of the rest stays as it is
    python benchmarks/kill.py --kills 5 --writes 20     a small part of it; writes nothing
    python benchmarks/kill.py --table                   prints the record as the rows of docs/reliability.md

Random moments, a number of them (``--kills``) for each of:

fit       a two-stage training with batch norm, killed at moments that are spread evenly over the whole of it, every
          fifth one when a temporary file of a checkpoint is seen. It is resumed and must end with the files of a run
          that was never killed, byte by byte; of ``metrics.json`` the seconds may differ.
stop      the same training gets SIGTERM instead. It must exit with code 143, without a lock, and no epoch is trained
          again unless all were done. Every third time SIGKILL follows up to 50 ms later, as from an impatient cluster.
folds     a fit by the recipe quick with three folds and its own cache of features, killed and resumed.
predict   some hundred images, a few of them unreadable, over the answers of an earlier call. After the kill the old
          answers or the new ones must be there, whole; after a second call the new ones, byte by byte.
reproduce the local engine with two workers on six cells. A worker is killed, and later the driver or its whole process
          group; then the same command again. A cell that was finished when a kill fell must not be touched again, each
          cell must have one record in the end, and all files must be those of a sweep that was never killed.
compare   the same for two methods over three folds of the same images.
find      the images that predict has, killed and called again; the list and the page must be those of one call.

Every write: the process kills itself before its k-th file operation (open for writing, truncate, fsync, rename, remove,
make or remove a folder) below the folder it writes to, for every k until it comes to its end: a fit that writes a
checkpoint after every epoch, a predict, and a sweep of two cells that are trained in the driver's process.

In the end there must be no temporary file, no lock, no claim and no process left.

fit, predict, find and what dies at a write are processes forked from one that has imported everything, so that no kill
falls into the import of torch; reproduce and compare are the commands as they are.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from lopsided.files import atomic_write

RECORD = Path(__file__).parent / "records" / "kill.json"
SOURCE = Path(__file__).parents[1] / "src"
PRELOAD = ["lopsided.cli", "lopsided.cli.train", "lopsided.cli.predict", "lopsided.training.fit"]
PRELOAD += ["lopsided.inference.predict", "lopsided.runs.sweep", "lopsided.runs.progress"]
PRELOAD += ["lopsided.evaluation.metrics", "torch._dynamo", "timm", "torchvision", "sklearn.metrics", "scipy.stats"]
PRELOAD += ["PIL.PngImagePlugin"]
RANDOM, WRITES = "random moments", "every write"
STOPPED = "SIGTERM at random moments"
STOPPED_CODE = 143
PATIENCE = 600.0
"""Seconds after which a process that should have ended is one that hangs."""
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
CHANGES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate"}
TIMES = ("time", "seconds", "images_per_second")

RECIPE = """
device = "cpu"
threads = 1
[data]
source = "fashion-mnist-tops"
scenario = "{scenario}"
held_out = {held_out}
val = {val}
[encoder]
name = "{encoder}"
[encoder_training]
epochs = {epochs}
batch_size = 16
[classifier]
epochs = {classifier_epochs}
batch_size = 16
augment = true
"""
RECIPES = {
    "fit": RECIPE.format(
        scenario="80:20,total=100", held_out="false", val=0.2, encoder="test_resnet", epochs=4, classifier_epochs=16
    ),
    "short": RECIPE.format(
        scenario="80:20,total=60", held_out="false", val=0.2, encoder="test_resnet", epochs=2, classifier_epochs=2
    ),
    "cell": RECIPE.format(
        scenario="90:10,total=200", held_out="false", val=0.0, encoder="mlp-256", epochs=12, classifier_epochs=4
    ),
    "tiny": RECIPE.format(
        scenario="90:10,total=60", held_out="false", val=0.0, encoder="mlp-64", epochs=1, classifier_epochs=1
    ),
}
WORKERS = ("--workers", "2", "--threads", "1")
SWEEPS = {
    "reproduce": ("reproduce", "eta", "--scenarios", "70:30,80:20,90:10", "--values", "0,300", "--runs", "1", *WORKERS),
    "compare": ("compare", "--methods", "ce,cl", "--folds", "3", *WORKERS),
}
"""Commands of six cells each."""


# Processes


def call(arguments: list[str], told: str, fatal: int | None, below: str, every_epoch: bool) -> None:
    """In a process of its own: the command, or a sweep in this process; it may die at its ``fatal``-th write."""
    sys.stdout = sys.stderr = open(told, "w", encoding="utf-8", buffering=1)  # noqa: SIM115  It ends with the process.
    if every_epoch:
        from lopsided.training import checkpoint

        checkpoint.TIMES_AS_LONG = 0.0
    if fatal is not None:
        die_at_write(fatal, below)
    if arguments[0] == "sweep":
        sys.exit(sweep_here(Path(arguments[1]), arguments[2]))
    from lopsided.cli import main as command

    command(arguments)


def die_at_write(fatal: int, below: str) -> None:
    """Kill this process before its ``fatal``-th change of a file or a folder below ``below``."""
    seen = 0
    below = os.path.realpath(below)

    def count() -> None:
        nonlocal seen
        seen += 1
        if seen == fatal:
            os.kill(os.getpid(), signal.SIGKILL)

    def is_below(path: Any) -> bool:
        if isinstance(path, int):
            with suppress(OSError):
                path = os.readlink(f"/proc/self/fd/{path}")
        return isinstance(path, (str, os.PathLike)) and f"{os.path.abspath(path)}/".startswith(f"{below}/")

    def hear(event: str, arguments: tuple[Any, ...]) -> None:
        opened = event == "open" and isinstance(arguments[2], int) and arguments[2] & WRITING
        if (opened or event in CHANGES) and is_below(arguments[0]):
            count()

    fsync = os.fsync

    def flush(descriptor: int) -> None:
        if is_below(descriptor):
            count()
        fsync(descriptor)

    sys.addaudithook(hear)
    os.fsync = flush  # Of all these the one that Python does not audit.


def sweep_here(folder: Path, recipe: str) -> int:
    """Run a sweep whose cells are trained by the driver itself, one after the other."""
    from lopsided.recipe import Recipe
    from lopsided.runs.engines import Ended
    from lopsided.runs.plan import CELLS, Cell, train_cell
    from lopsided.runs.records import Record
    from lopsided.runs.sweep import run_sweep

    class Here:
        slots = 1

        def open(self, folder: Path, *, models: bool = False) -> None:
            self.folder = folder

        def submit(self, cell: Cell) -> None:
            self.cell = cell

        def wait(self, seconds: float) -> list[Ended]:
            line, error = train_cell(self.cell.recipe.to_toml(), str(self.folder / CELLS / self.cell.key), 1)
            return [Ended(self.cell, Record.from_json(line) if line else None, error)]

        def close(self) -> None:
            pass

    base = Recipe.load(recipe)
    return len(run_sweep([base.override(seed=seed) for seed in range(2)], folder, engine=Here()).failed)


class Forked:
    """A process that was forked from one which has imported everything."""

    context = multiprocessing.get_context("forkserver")

    def __init__(
        self, arguments: list[str], told: Path, *, fatal: int | None = None, below: Path = Path(), every: bool = False
    ) -> None:
        self.told = told
        values = (arguments, str(told), fatal, str(below), every)
        self.process = self.context.Process(target=call, args=values)
        self.process.start()

    def wait(self, seconds: float = PATIENCE) -> int | None:
        """The exit code, or None if it is still running then."""
        self.process.join(seconds)
        return self.process.exitcode

    def kill(self) -> bool:
        """Whether there was something to kill."""
        self.process.kill()
        self.process.join()
        return self.process.exitcode == -signal.SIGKILL

    def end(self) -> int:
        """Wait to the end; a process that hangs is killed and counts as failed."""
        code = self.wait()
        if code is None:
            self.kill()
        return -1 if code is None else code


# What is there


def content_of(folder: Path) -> dict[str, Any]:
    """All that a run's folder says, but for times, of which a killed run has others."""
    content: dict[str, Any] = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder).as_posix()
        if path.name == "metrics.json":
            content[name] = {k: v for k, v in json.loads(path.read_bytes()).items() if k != "seconds"}
        elif path.name == "log.jsonl":
            content[name] = sorted(epochs_of(path).items())
        elif path.name == "records.jsonl":
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            content[name] = sorted(json.dumps({k: v for k, v in line.items() if k != "seconds"}) for line in lines)
        elif path.parent.name == "checkpoint":
            content[name] = "there"  # Of a finished run it holds when it was, and nothing else.
        elif path.name != "failures.jsonl":  # Holds that a worker was killed, as it should.
            content[name] = path.read_bytes()
    return content


def epochs_of(log: Path) -> dict[str, Any]:
    """The facts of each epoch, the last line of an epoch that was trained again."""
    return {
        f"{event['stage']} {event['epoch']}": {k: v for k, v in event.items() if k not in TIMES}
        for event in events_of(log)
        if event["event"] == "epoch"
    }


def events_of(log: Path) -> list[dict[str, Any]]:
    """The events of a log, without a line that was cut off."""
    found = []
    if log.exists():
        for line in log.read_bytes().splitlines():
            with suppress(ValueError):
                found.append(json.loads(line))
    return found


def compare(content: dict[str, Any], expected: dict[str, Any], context: str) -> list[str]:
    """Say in what a folder differs from one that nobody disturbed."""
    if content == expected:
        return []
    names = [name for name in {**content, **expected} if content.get(name) != expected.get(name)]
    return [f"{context}: {', '.join(names)} differ"]


def temporaries(folder: Path) -> int:
    """How many files have a temporary name."""
    return sum(1 for _ in folder.rglob(".*.tmp"))


def phase_of(run: Path, expected: object = None) -> str:
    """How far a run had come."""
    if not (run / "recipe.toml").exists():
        return "before the run was there"
    if (run / "metrics.json").exists():
        return "after the last file"
    events = [event for event in events_of(run / "log.jsonl") if event["event"] in ("stage", "end")]
    if not events:
        return "before the first stage"
    if (run / "model.json").exists() or events[-1]["event"] == "end":
        return "writing results"
    return f"stage {events[-1]['stage']}"


class Tally:
    """Counts of one question, and what went wrong in words."""

    heard: Callable[[Tally], None] = staticmethod(lambda tally: None)
    """Called after each kill, so that what is known by then is written down."""

    def __init__(self, name: str) -> None:
        self.name, self.phases, self.wrong = name, Counter[str](), list[str]()
        self.counts = Counter[str]()

    def kill(self, phase: str, wrong: list[str], **more: int) -> None:
        """Count a kill and what was wrong after it."""
        self.phases[phase] += 1
        self.counts["kills"] += 1
        self.counts["equal_afterwards"] += not wrong
        self.counts.update(more)
        self.wrong += wrong
        told = f"; {'; '.join(wrong)}" if wrong else ""
        print(f"{self.name} {self.counts['kills']}: killed {phase}{told}", flush=True)
        self.heard(self)

    def to_dict(self) -> dict[str, Any]:
        """All counts, for the record."""
        return {
            **self.counts,
            "phases": dict(sorted(self.phases.items())),
            "wrong": self.wrong,
        }


# Questions


def fit_arguments(data: Path, out: Path, recipe: str = "fit") -> list[str]:
    """The command that starts a run and goes on with it."""
    return ["fit", "--recipe", str(data / f"{recipe}.toml"), "--out", str(out), "--resume", "--quiet"]


def undisturbed(data: Path, name: str, arguments: Callable[[Path], list[str]], **more: Any) -> tuple[Any, float]:
    """What a call leaves that nobody disturbs, and how long the second of two takes."""
    seconds = 0.0
    for number in range(2):
        out = data / f"{name}-whole-{number}"
        begin = time.monotonic()
        process = Forked(arguments(out), data / "told.txt", **more)
        assert process.end() == 0, process.told.read_text()
        seconds = time.monotonic() - begin
    expected = [content_of(data / f"{name}-whole-{number}") for number in range(2)]
    assert expected[0] == expected[1], compare(expected[0], expected[1], "undisturbed")
    return expected[0], seconds


Phase = Callable[[Path, dict[str, Any]], str]
"""Says from a folder, and from what there should be in the end, how far the work had come."""
Hit = Callable[["Forked", Path, int, float], bool]
"""Ends the process of a folder in the n-th trial, about so many seconds after its start; whether it was in time."""


def at_random(
    data: Path, name: str, arguments: Callable[[Path], list[str]], phase: Phase, kills: int, rng: random.Random,
    hit: Hit, prepare: Callable[[Path], None] = lambda out: None, how: str = RANDOM,
) -> Tally:  # fmt: skip
    """Kill a call at moments that are spread evenly over it, and call it again."""
    tally = Tally(f"{name}, {how}")
    expected, seconds = undisturbed(data, f"{name}-{len(how)}", arguments)
    while (number := tally.counts["kills"]) < kills:
        out = data / f"{name}-tried"
        prepare(out)
        process = Forked(arguments(out), data / "told.txt")
        if hit(process, out, number, seconds * (number + rng.random()) / kills):
            where, left, lock = phase(out, expected), temporaries(out), (out / ".lock").exists()
            before = len(events_named(out / "log.jsonl", "epoch"))
            more = {"left_a_temporary_file": left > 0}
            wrong = ["half of the answers have the file's name"] if where.startswith("half") else []
            if process.process.exitcode == STOPPED_CODE:
                wrong += [f"{where}: left a lock or a temporary file"] if left or lock else []
                more["saved_and_exited_with_143"] = 1
            again = Forked(arguments(out), data / "told.txt")
            wrong += [] if again.end() == 0 else [f"the second call failed: {again.told.read_text()}"]
            wrong += compare(content_of(out), expected, where)
            if "log.jsonl" in expected:
                trained = len(events_named(out / "log.jsonl", "epoch"))
                repeated = trained - len(expected["log.jsonl"])
                more |= {"epochs_before_the_kill": before, "epochs_trained_again": repeated}
                if process.process.exitcode == STOPPED_CODE and repeated and before < len(expected["log.jsonl"]):
                    wrong.append(f"{where}: {repeated} epochs were trained again after SIGTERM")
            tally.kill(where, wrong, **more, temporary_files_afterwards=temporaries(out))
        else:
            tally.counts["too_late"] += 1
            seconds *= 0.95  # The undisturbed call had more to wait for.
        shutil.rmtree(out, ignore_errors=True)
    return tally


def kill_later(process: Forked, out: Path, number: int, seconds: float) -> bool:
    """Kill a process after some seconds."""
    process.wait(seconds)
    return process.kill()


def fit_at_random(data: Path, kills: int, rng: random.Random) -> Tally:
    """Kill trainings and resume them; every fifth one when a temporary file of a checkpoint is seen."""

    def hit(process: Forked, out: Path, number: int, seconds: float) -> bool:
        if number % 5 == 4:
            aim(process, out / "checkpoint", rng.randint(1, 3))
            seconds = 0.0
        return kill_later(process, out, number, seconds)

    return at_random(data, "fit", partial(fit_arguments, data), phase_of, kills, rng, hit)


def stop_at_random(data: Path, kills: int, rng: random.Random) -> Tally:
    """Ask trainings to stop, and kill every third that does not hurry."""

    def hit(process: Forked, out: Path, number: int, seconds: float) -> bool:
        if process.wait(seconds) is not None:
            return False
        process.process.terminate()
        if number % 3 == 2:
            kill_later(process, out, number, 0.05 * rng.random())
        return process.end() in (STOPPED_CODE, -signal.SIGKILL)

    return at_random(data, "fit", partial(fit_arguments, data), phase_of, kills, rng, hit, how=STOPPED)


def folds_at_random(data: Path, kills: int, rng: random.Random) -> Tally:
    """Kill fits by folds and resume them."""

    def arguments(out: Path) -> list[str]:
        return ["fit", str(data / "classes"), "--recipe", "quick", "--folds", "3", "--out", str(out), "--resume", "-q"]

    return at_random(data, "folds", arguments, folds_phase, kills, rng, kill_later, lambda out: forget(data))


def forget(data: Path) -> None:
    """Remove the cached features, so that these are computed again."""
    shutil.rmtree(data / "cache", ignore_errors=True)


def folds_phase(out: Path, expected: dict[str, Any]) -> str:
    """How far a fit by folds had come."""
    if not (out / "recipe.toml").exists():
        return "before the run was there"
    if (out / "metrics.json").exists():
        return "after the metrics"
    done = len(list(out.glob("folds/*/metrics.json")))
    return f"{done} of 3 folds done"


def find_at_random(data: Path, kills: int, rng: random.Random) -> Tally:
    """Kill searches and call them again."""

    def arguments(out: Path) -> list[str]:
        out.mkdir(parents=True, exist_ok=True)
        return ["find", str(data / "model"), str(data / "photos"), "--out", str(out / "found.csv"), "--quiet"]

    def phase(out: Path, expected: dict[str, Any]) -> str:
        if not (out / "found.csv").exists():
            return "before the list" if temporaries(out) or any(out.iterdir()) else "before the first score"
        if (out / "found.csv").read_bytes() != expected["found.csv"]:
            return "half of the answers there"
        return "after the list"

    return at_random(data, "find", arguments, phase, kills, rng, kill_later)


def events_named(log: Path, name: str) -> list[dict[str, Any]]:
    """The events of one kind."""
    return [event for event in events_of(log) if event["event"] == name]


def aim(process: Forked, folder: Path, number: int) -> None:
    """Return while the ``number``-th temporary file that is seen in a folder is there."""
    seen: set[tuple[str, int]] = set()
    while process.process.is_alive():
        with suppress(OSError):
            for path in folder.glob(".*.tmp"):
                seen.add((path.name, path.stat().st_ino))
                if len(seen) >= number:
                    return


def every_write(
    data: Path, name: str, arguments: Callable[[Path], list[str]], phase: Callable[[Path], str], most: int | None
) -> Tally:
    """Die before the first write, before the second, and so on, until there is none left."""
    tally = Tally(f"{name}, {WRITES}")
    below = data / f"{name}-every"
    expected, _ = undisturbed(data, f"{name}-every", lambda out: arguments(out / "out"), every=True)
    fatal = 0
    while most is None or fatal < most:
        fatal += 1
        below.mkdir()
        process = Forked(arguments(below / "out"), data / "told.txt", fatal=fatal, below=below, every=True)
        code = process.end()
        if code == -signal.SIGKILL:
            where, left = phase(below / "out"), temporaries(below)
            again = Forked(arguments(below / "out"), data / "told.txt", every=True)
            wrong = [] if again.end() == 0 else [f"write {fatal}: the second call failed: {again.told.read_text()}"]
            wrong += compare(content_of(below), expected, f"write {fatal}, {where}")
            tally.kill(where, wrong, left_a_temporary_file=left > 0, temporary_files_afterwards=temporaries(below))
        shutil.rmtree(below)
        if code != -signal.SIGKILL:
            if code:
                tally.wrong.append(f"write {fatal}: ended with code {code}: {process.told.read_text()}")
            break
    return tally


def predict_arguments(data: Path, out: Path) -> list[str]:
    """The command that predicts into a folder."""
    out.mkdir(parents=True, exist_ok=True)
    return ["predict", str(data / "model"), str(data / "photos"), "--out", str(out / "answers.csv"), "--quiet"]


def predict_phase(expected: dict[str, Any], old: bytes, out: Path) -> str:
    """What was there after a kill; the answers must be those of one call."""
    answers, beside = out / "answers.csv", out / "answers.unreadable.csv"
    if not answers.exists() or answers.read_bytes() == old:
        return "before the answers had their name" if temporaries(out) else "before the first answer"
    if answers.read_bytes() != expected["answers.csv"]:
        return "half of the answers there"
    return "between the two files" if temporaries(out) or not beside.exists() else "after the last file"


def predict_at_random(data: Path, kills: int, rng: random.Random) -> Tally:
    """Kill predictions and call them again."""
    old = b"path,predicted,p:cat\nan earlier call\n"

    def prepare(out: Path) -> None:
        predict_arguments(data, out)
        (out / "answers.csv").write_bytes(old)

    def phase(out: Path, expected: dict[str, Any]) -> str:
        return predict_phase(expected, old, out)

    return at_random(data, "predict", partial(predict_arguments, data), phase, kills, rng, kill_later, prepare)


class Sweep:
    """The command ``reproduce`` or ``compare`` with two workers, as a session of its own."""

    killed = False

    def __init__(self, data: Path, out: Path, verb: str) -> None:
        self.out, self.told = out, data / "told.txt"
        command = [sys.executable, "-m", "lopsided", *SWEEPS[verb], "--recipe", str(data / "cell.toml")]
        with self.told.open("w") as told:
            self.process = subprocess.Popen(
                [*command, "--out", str(out)], stdout=told, stderr=told, start_new_session=True,
                env={**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"},
            )  # fmt: skip

    def workers(self) -> list[int]:
        """The worker processes; not the one of Python that tracks resources."""
        found = []
        with suppress(OSError):
            for pid in Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split():
                found += [int(pid)] if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes() else []
        return found

    def working(self) -> bool:
        """Whether a cell is in work, or nothing is left to do."""
        return self.process.poll() is not None or any(self.out.glob("cells/*/.lock"))

    def members(self) -> list[int]:
        """The processes of the session that still live."""
        found = []
        for path in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):
                state, _, group = path.read_text().rpartition(")")[2].split()[:3]
                if int(group) == self.process.pid and state != "Z":
                    found.append(int(path.parent.name))
        return found

    def end(self) -> int:
        """The exit code; a sweep that hangs is killed and counts as failed."""
        with suppress(subprocess.TimeoutExpired):
            return self.process.wait(PATIENCE)
        os.killpg(self.process.pid, signal.SIGKILL)
        return -1


def cells_of(out: Path) -> dict[str, tuple[bytes, bytes]]:
    """What is there of each finished cell."""
    return {
        path.parent.name: (path.read_bytes(), (path.parent / "log.jsonl").read_bytes())
        for path in out.glob("cells/*/metrics.json")
    }


def sweep_phase(out: Path, total: int) -> str:
    """How far a sweep had come."""
    if not any(out.glob("cells/*")):
        return "before the first cell"
    done = len(cells_of(out))
    if done == total:
        lines = (out / "records.jsonl").read_text().count("\n") if (out / "records.jsonl").exists() else 0
        return "writing tables" if lines == total else "all cells trained, not all recorded"
    return f"{done} of {total} cells done"


def sweep_at_random(verb: str, data: Path, kills: int, rng: random.Random) -> Tally:
    """Kill a worker and then the driver, a worker and then the group, and a worker alone; three starts a sweep."""
    tally = Tally(f"{verb}, {RANDOM}")
    begin = time.monotonic()
    whole = Sweep(data, data / f"{verb}-whole", verb)
    wait_until(whole.working)
    starting, begin = time.monotonic() - begin, time.monotonic()
    assert whole.end() == 0, whole.told.read_text()
    seconds = time.monotonic() - begin
    expected = content_of(data / f"{verb}-whole")
    total = len(cells_of(data / f"{verb}-whole"))
    out = data / "sweep"
    while tally.counts["kills"] < kills:
        wrong: list[str] = []
        killed: list[str] = []
        for victims in (("worker", "driver"), ("worker", "group"), ("worker",)):
            sweep = Sweep(data, out, verb)
            if rng.random() < 0.1:
                time.sleep(starting * rng.random())
            else:
                wait_until(sweep.working)
            for victim in victims:
                left = max(0.1, 1 - len(cells_of(out)) / total)
                time.sleep(seconds * left * rng.random() / len(victims))
                before, phase = cells_of(out), sweep_phase(out, total)
                if not kill(sweep, victim, rng):
                    tally.counts["too_late"] += 1
                    continue
                killed.append(f"the {victim}, {phase}")
                wrong += [f"{cell} was touched after {killed}" for cell in touched(before, cells_of(out))]
            if victims[-1] == "worker" or not sweep.killed:
                wrong += [] if sweep.end() == 0 else [f"after {killed}: {sweep.told.read_text()}"]
            wait_until(lambda sweep=sweep: not sweep.members())
            wrong += [f"{cell} was touched after {killed}" for cell in touched(before, cells_of(out))]
        wrong += compare(content_of(out), expected, f"after {killed}")
        lines = [json.loads(line)["cell"] for line in (out / "records.jsonl").read_text().splitlines()]
        logs = list(out.glob("cells/*/log.jsonl"))
        begun = sum(len(events_named(log, "start")) + len(events_named(log, "resume")) for log in logs)
        tally.counts.update(
            sweeps=1, cells=total, records=len(lines), cells_recorded_twice=len(lines) - len(set(lines)),
            cells_lost=total - len(set(lines)), starts_of_cells=begun,
            temporary_files_afterwards=temporaries(out), claims_afterwards=len(list(out.glob("claims/*"))),
        )  # fmt: skip
        for index, phase in enumerate(killed):
            tally.kill(phase, wrong if index == len(killed) - 1 else [])
        shutil.rmtree(out)
    return tally


def kill(sweep: Sweep, victim: str, rng: random.Random) -> bool:
    """Kill one of a sweep's processes, or all of them; whether there was one."""
    if sweep.process.poll() is not None:
        return False
    with suppress(ProcessLookupError):
        if victim == "worker":
            workers = sweep.workers()
            if workers:
                os.kill(rng.choice(workers), signal.SIGKILL)
            return bool(workers)
        if victim == "group":
            os.killpg(sweep.process.pid, signal.SIGKILL)
        sweep.process.kill()
        sweep.killed = sweep.process.wait() == -signal.SIGKILL
    return sweep.killed


def touched(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """The finished cells that are no longer as they were."""
    return [cell for cell in before if after.get(cell) != before[cell]]


def wait_until(happened: Callable[[], object]) -> None:
    """Wait for something to happen."""
    end = time.monotonic() + PATIENCE
    while not happened():
        assert time.monotonic() < end, f"nothing within {PATIENCE} s"
        time.sleep(0.005)


# All together


@contextmanager
def prepared() -> Iterator[Path]:
    """A folder with recipes, images and a model."""
    with tempfile.TemporaryDirectory() as name:
        data = Path(name)
        for recipe, text in RECIPES.items():
            (data / f"{recipe}.toml").write_text(text)
        os.environ["LOPSIDED_CACHE"] = str(data / "cache")
        write_images(data / "photos", 600)
        for classname, number in {"many": 40, "few": 12}.items():
            write_images(data / "classes" / classname, number, broken=False)
        Forked.context.set_forkserver_preload(PRELOAD)
        model = Forked(fit_arguments(data, data / "model"), data / "told.txt")
        assert model.end() == 0, model.told.read_text()
        yield data


def write_images(folder: Path, number: int, broken: bool = True) -> None:
    """Images of noise, every fiftieth of them unreadable if ``broken``."""
    import numpy as np
    from PIL import Image

    folder.mkdir(parents=True)
    rng = np.random.default_rng(number)
    for index in range(number):
        path = folder / f"{index:04d}.png"
        if broken and index % 50 == 7:
            path.write_bytes(b"no image")
        else:
            Image.fromarray(rng.integers(0, 256, (64, 64), dtype=np.uint8)).save(path)


def fit_at_writes(data: Path, writes: int | None) -> Tally:
    """Let a fit die at its writes."""
    return every_write(data, "fit", lambda out: fit_arguments(data, out, "short"), phase_of, writes)


def predict_at_writes(data: Path, writes: int | None) -> Tally:
    """Let a predict die at its writes."""
    expected, _ = undisturbed(data, "predict-expected", lambda out: predict_arguments(data, out))
    return every_write(data, "predict", partial(predict_arguments, data), partial(predict_phase, expected, b""), writes)


def sweep_at_writes(data: Path, writes: int | None) -> Tally:
    """Let a sweep of two cells die at its writes."""
    recipe = str(data / "tiny.toml")
    return every_write(data, "sweep", lambda out: ["sweep", str(out), recipe], lambda out: sweep_phase(out, 2), writes)


KILLED = {"predict": predict_at_random, "fit": fit_at_random, "stop": stop_at_random, "folds": folds_at_random}
KILLED |= {"find": find_at_random, **{verb: partial(sweep_at_random, verb) for verb in SWEEPS}}
WRITTEN = {"predict-writes": predict_at_writes, "fit-writes": fit_at_writes, "sweep-writes": sweep_at_writes}
QUESTIONS = ("predict", "predict-writes", "fit", "fit-writes", "stop", "folds", "find", "sweep-writes", *SWEEPS)


def ask(question: str, data: Path, kills: int, writes: int | None, rng: random.Random) -> Tally:
    """Answer one question."""
    if question not in QUESTIONS:
        raise SystemExit(f"--only must be some of {', '.join(QUESTIONS)}, got {question}")
    return KILLED[question](data, kills, rng) if question in KILLED else WRITTEN[question](data, writes)


def print_table(record: dict[str, Any]) -> None:
    """Print what the record says as the rows of a Markdown table, questions in their order."""
    kinds = ("fit", "folds", "predict", "find", "reproduce", "compare", "sweep")
    names = [f"{name}, {how}" for name in kinds for how in (RANDOM, STOPPED, WRITES)]
    for name in (name for name in names if name in record):
        result = record[name]
        phases = Counter[str]()
        for phase, number in result["phases"].items():
            # Of a sweep: who was killed, or else how far it had come.
            phases[phase.partition(",")[0] if name.partition(",")[0] in SWEEPS else phase] += number
        told = ", ".join(f"{phase} {number}" for phase, number in phases.items())
        print(f"| {name} | {result['kills']} | {result['equal_afterwards']} | {told} |")


def main() -> int:
    """Ask all questions, print what happened, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50, help="random moments of each command (default: %(default)s)")
    parser.add_argument("--writes", type=int, help="end at this write, and write no record (default: every one)")
    parser.add_argument("--only", default="", help=f"some of {', '.join(QUESTIONS)}, with commas")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=RECORD, help="record to write (default: records/kill.json)")
    parser.add_argument("--table", action="store_true", help="kill nothing, print the record")
    options = parser.parse_args()
    if options.table:
        print_table(json.loads(options.out.read_text()))
        return 0
    only = options.only.split(",") if options.only else QUESTIONS
    asked = f"python benchmarks/kill.py --kills {options.kills} --seed {options.seed}"
    asked += f" --only {options.only}" if options.only else ""

    def write(tally: Tally) -> None:
        record = json.loads(options.out.read_text()) if options.out.exists() else {}
        record[tally.name] = {"command": asked, **tally.to_dict()}
        atomic_write(options.out, json.dumps(record, indent=1) + "\n")

    if options.writes is None:
        Tally.heard = staticmethod(write)
    rng = random.Random(options.seed)
    with prepared() as data:
        done = [ask(question, data, options.kills, options.writes, rng) for question in only]
    print()
    for tally in done:
        tally.heard(tally)
        print(f"{tally.name}: {tally.counts['kills']} kills, {tally.counts['equal_afterwards']} equal afterwards")
        for told in tally.wrong:
            print(f"  {told}")
    return any(tally.wrong for tally in done)


if __name__ == "__main__":
    sys.exit(main())
