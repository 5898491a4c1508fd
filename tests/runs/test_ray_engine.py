from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pandas
import pytest

from lopsided import __version__, files
from lopsided.errors import InputError, MissingDependencyError
from lopsided.models.model import load_card
from lopsided.runs import auto
from lopsided.runs.engines import LOST, ray_engine
from lopsided.runs.engines.ray_engine import RayEngine, train_on_node
from lopsided.runs.folder import Run
from lopsided.runs.plan import Cell
from lopsided.runs.records import Record, read_failures, read_records
from lopsided.runs.sweep import run_sweep
from ray_nodes import cluster, with_ray
from tiny_boards import scalars
from tiny_command import command_here, names_below
from tiny_sweep import Heard, is_alive, tiny_recipe, wait_until

__all__ = ["cluster"]


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_engine.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError) as caught:
        RayEngine("auto")
    assert (
        str(caught.value)
        == "--engine ray needs the package ray, which is not installed. Run pip install 'lopsided[ray]'."
    )


@with_ray
def test_where_nothing_listens_there_is_no_cluster(tmp_path: Path, photos: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.2", 0))
        address = f"127.0.0.2:{unused.getsockname()[1]}"
    said = rf"^Cannot connect to a Ray cluster at {address}: no cluster answers \(.*\)\. Start a"
    with pytest.raises(InputError, match=said):
        run_sweep([tiny_recipe(photos)], tmp_path, engine=RayEngine(address))


@with_ray
def test_what_listens_but_never_answers_is_no_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_engine, "CONNECT_SECONDS", 2.0)
    with socket.socket() as mute:
        mute.bind(("127.0.0.2", 0))
        mute.listen()
        engine = RayEngine(f"127.0.0.2:{mute.getsockname()[1]}")
        with pytest.raises(
            InputError, match=r"^Cannot connect to a Ray cluster at [\d.:]+: no cluster answers\. Start a "
        ):
            engine.open(tmp_path)
        engine.close()


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Let an interrupt raise KeyboardInterrupt even where it is ignored, as in a background job of a script."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_a_probe_that_is_interrupted_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[subprocess.Popen[str]] = []

    class Interrupted(subprocess.Popen):  # type: ignore[type-arg]
        def communicate(self, *arguments: Any, **more: Any) -> Any:
            asked.append(self)
            signal.raise_signal(signal.SIGINT)
            return super().communicate(*arguments, **more)

    monkeypatch.setattr(ray_engine, "_PROBE", "import time; print(flush=True); time.sleep(600)")
    monkeypatch.setattr(ray_engine.subprocess, "Popen", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        ray_engine._asked("127.0.0.2:1")
    assert asked[0].returncode == -signal.SIGKILL


@with_ray
def test_what_ray_says_about_an_address_is_passed_on(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"at nowhere: Ray reports: ValueError: Invalid address format: nowhere\. Start"
    ):
        RayEngine("nowhere").open(tmp_path)


@with_ray
def test_threads_must_fit_into_a_node(cluster: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^threads must be >= 1, got 0\.$"):
        RayEngine(cluster.address, 0)
    said = r"^threads must be at most the cores of the cluster's largest node, 1, got 2\.$"
    with closing(RayEngine(cluster.address, 2)) as engine, pytest.raises(InputError, match=said):
        engine.open(tmp_path)


def worker_of(folder: Path) -> int | None:
    """The process that trains into a run folder, once there is a checkpoint."""
    lock = folder / files.LOCK_NAME
    if (folder / "checkpoint" / "state.safetensors").exists() and lock.exists() and (content := lock.read_text()):
        return int(json.loads(content)["pid"])
    return None


def parent_of(pid: int | None) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except FileNotFoundError:
        return None


def results_of(folder: Path) -> tuple[bytes, bytes, dict[str, Any]]:
    """The model, the predictions and the figures of a run."""
    metrics = json.loads((folder / "metrics.json").read_text())
    kept = {name: metrics[name] for name in ("recipe", "folds", "test", "fingerprint", "decision")}
    return (folder / "model.safetensors").read_bytes(), (folder / "predictions.csv").read_bytes(), kept


@pytest.fixture(scope="class")
def engine(cluster: Any) -> Iterator[tuple[str, ...]]:
    """Options for the cluster, to which the process is connected."""
    import ray

    before = signal.getsignal(signal.SIGTERM)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    yield "--engine", f"ray:{cluster.address}"
    ray.shutdown()
    signal.signal(signal.SIGTERM, before)


@with_ray
class TestCommands:
    """Commands on the cluster. They share a connection, and so the workers, whose imports take seconds."""

    FLAGS = ("--encoder", "mlp", "batch_size=8", "--device", "cpu", "compare_quick=false")

    def test_folds_have_the_results_of_one_process_even_if_a_worker_dies(
        self, engine: tuple[str, ...], photos: Path, tmp_path: Path
    ) -> None:
        flags = (photos, "--folds", "2", "--loss", "ce", "epochs=40", *self.FLAGS)
        here = command_here("fit", *flags, "--out", tmp_path / "here")
        assert here.code == 0, here.err
        folds = tmp_path / "far" / "folds"

        def kill() -> None:
            os.kill(wait_until(lambda: worker_of(folds / "1") or worker_of(folds / "2"), 600.0), signal.SIGKILL)

        killer = threading.Thread(target=kill)
        killer.start()
        far = command_here("fit", *flags, "--out", tmp_path / "far", *engine)
        killer.join()
        assert far.code == 0, far.err
        assert far.err.count("is tried again: The worker ended") == 1
        assert results_of(tmp_path / "far") == results_of(tmp_path / "here")

    def test_auto_hands_over_the_model_that_one_process_makes_of_its_recipe(
        self, engine: tuple[str, ...], photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(auto, "_METHODS", ("ce", "weighted-ce"))
        out = tmp_path / "auto"
        flags = ("--folds", "2", "epochs=1", "classifier_epochs=1", *self.FLAGS)
        ended = command_here("fit", photos, "--auto", "--out", out, *flags, *engine)
        assert ended.code == 0, ended.err
        methods = [record.compared_as for record in read_records(out / "comparison" / "records.jsonl")[0]]
        assert sorted(map(str, methods)) == ["ce", "ce", "weighted-ce", "weighted-ce"]
        again = command_here("fit", "--recipe", out / "recipe.toml", "--out", tmp_path / "again")
        assert again.code == 0, again.err
        assert results_of(out) == results_of(tmp_path / "again")

    @pytest.mark.filterwarnings("ignore")  # Ray Data warns of its own deprecated settings.
    def test_columns_beside_the_images_go_with_them(
        self, engine: tuple[str, ...], photos: Path, tmp_path: Path
    ) -> None:
        names = sorted(path.relative_to(photos).as_posix() for path in photos.rglob("*.png"))
        rows = [f"{name},{name[:3]},{'' if i == 7 else i % 9},{'fm'[i % 2]}\n" for i, name in enumerate(names)]
        table = photos.parent / "pets.csv"
        table.write_text("path,label,age,sex\n" + "".join(f"{photos.name}/{row}" for row in rows))
        flags = ("--columns", "age,sex", "--recipe", "quick", "image_size=32", "--folds", "2", "--device", "cpu")
        for name, place in (("here", ()), ("far", engine)):
            ended = command_here("fit", table, *flags, "--out", tmp_path / name, *place)
            assert ended.code == 0, ended.err
            answers = ("--out", tmp_path / f"{name}.csv", "--quiet")
            ended = command_here("predict", tmp_path / "here", table, *answers, *place)
            assert ended.code == 0, ended.err
        assert results_of(tmp_path / "far") == results_of(tmp_path / "here")
        assert [column.name for column in load_card(tmp_path / "far").beside] == ["age", "sex"]
        here, far = (pandas.read_csv(tmp_path / f"{name}.csv") for name in ("here", "far"))
        pandas.testing.assert_frame_equal(far, here, atol=1e-5)

    def test_cells_are_child_runs_of_the_comparison_in_a_tracker(
        self, engine: tuple[str, ...], photos: Path, tmp_path: Path
    ) -> None:
        out, boards = tmp_path / "CMP", tmp_path / "boards"
        sets = {"encoder.name": "mlp", "encoder_training.epochs": 2, "encoder_training.batch_size": 8, "device": "cpu"}
        flags = [f"{name}={value}" for name, value in sets.items()]
        tracked = ("--methods", "ce", "--folds", "2", "--track", f"tensorboard:{boards}", "--out", out)
        ended = command_here("compare", photos, *tracked, *flags, *engine)
        assert ended.code == 0, ended.err
        records = read_records(out / "records.jsonl")[0]
        uwas = {record.cell[:8]: record.test.uwa for record in records}
        children = {path.name[-8:]: scalars(path) for path in (boards / "CMP").iterdir() if path.is_dir()}
        assert {cell: points["test/uwa"][0][1] for cell, points in children.items()} == pytest.approx(uwas, abs=1e-4)
        steps = [*range(1, records[0].epochs[0] + 1)]
        assert [[step for step, _ in points["end-to-end/loss"]] for points in children.values()] == [steps, steps]
        assert scalars(boards / "CMP")["uwa/ce"] == [(0, pytest.approx(sum(uwas.values()) / 2, abs=1e-4))]

    def test_a_node_that_does_not_see_the_folder_sends_the_run_back(
        self, engine: tuple[str, ...], cluster: Any, photos: Path, tmp_path: Path
    ) -> None:
        class Far(RayEngine):
            def open(self, folder: Path, *, models: bool = False) -> None:
                super().open(folder, models=models)
                next(folder.glob(".seen-*")).unlink()

        bad = tiny_recipe(photos, **{"data.scenario": "10:90,total=100"})
        outcome = run_sweep([tiny_recipe(photos), bad], tmp_path / "sweep", engine=Far(cluster.address))
        assert [record.seed for record in outcome.done] == [0]
        assert [failure.error.split(",")[0] for failure in outcome.failed] == ["10:90"]
        cell = outcome.done[0].cell
        kept = [
            "features.safetensors",
            "log.jsonl",
            "metrics.json",
            "predictions.csv",
            "recipe.toml",
        ]
        assert names_below(tmp_path / "sweep" / "cells") == [f"{cell}/{name}" for name in kept]
        assert Run.open(tmp_path / "sweep" / "cells" / cell).finished
        again = run_sweep(
            [tiny_recipe(photos, seed=1)], tmp_path / "models", engine=Far(cluster.address), keep_models=True
        )
        folder = tmp_path / "models" / "cells" / again.done[0].cell
        assert names_below(folder) == sorted([*kept, "familiar.safetensors", "model.json", "model.safetensors"])

    def test_closing_ends_the_cells_that_are_running_and_leaves_a_connection_that_was_there(
        self, engine: tuple[str, ...], photos: Path, tmp_path: Path
    ) -> None:
        import ray

        cell = Cell.of(tiny_recipe(photos, 100_000))
        far = RayEngine("somewhere:else")
        far.open(tmp_path)
        far.submit(cell)
        pid = wait_until(lambda: worker_of(tmp_path / "cells" / cell.key))
        assert far.wait(0.1) == []
        far.close()
        wait_until(lambda: not is_alive(pid))
        assert list(tmp_path.glob(".seen-*")) == []
        assert ray.is_initialized()


@with_ray
def test_a_node_that_is_killed_half_way_costs_no_cell(
    cluster: Any, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import ray

    recipes = [tiny_recipe(photos, 40, seed=seed) for seed in range(3)]
    cells = [Cell.of(recipe).key for recipe in recipes]

    node = cluster.second.all_processes["raylet"][0].process.pid

    def kill() -> None:
        wait_until(lambda: node in [parent_of(worker_of(tmp_path / "cells" / cell)) for cell in cells])
        cluster.remove_node(cluster.second, allow_graceful=False)

    killer = threading.Thread(target=kill)
    killer.start()
    view, before = Heard(), signal.getsignal(signal.SIGTERM)
    outcome = run_sweep(recipes, tmp_path, engine=RayEngine(cluster.address), view=view)
    killer.join()
    assert not ray.is_initialized()
    assert signal.getsignal(signal.SIGTERM) is before
    assert capsys.readouterr().out == ""  # Where Ray would tell of the death.
    assert [record.seed for record in outcome.done] == [0, 1, 2]
    assert [record.threads for record in outcome.done] == [1] * 3
    assert outcome.failed == []
    [lost] = read_failures(tmp_path / "failures.jsonl")
    assert view.failures == [(lost, True)]
    assert lost.error.startswith(LOST)
    for cell in cells:
        events = [event["event"] for event in Run.open(tmp_path / "cells" / cell).events()]
        assert [event for event in events if event in ("start", "resume")] == (
            ["start", "resume"] if cell == lost.cell else ["start"]
        )


@pytest.mark.parametrize("models", [False, True])
def test_a_model_is_sent_only_where_it_is_wanted(photos: Path, tmp_path: Path, models: bool) -> None:
    nowhere = str(tmp_path / "nowhere")
    line, error, content = train_on_node(tiny_recipe(photos).to_toml(), nowhere, nowhere, 1, models)
    assert (Record.from_json(line).seed, error) == (0, "")
    assert {"recipe.toml", "log.jsonl", "metrics.json", "predictions.csv"} < set(content)
    assert ({"model.json", "model.safetensors"} <= set(content)) == models
    assert ("model.json" in content or "model.safetensors" in content) == models
    assert list(tmp_path.iterdir()) == []


def test_a_lock_that_a_lost_node_left_is_removed_and_no_other(tmp_path: Path) -> None:
    lock = tmp_path / files.LOCK_NAME
    lock.write_text(json.dumps({"pid": 1, "host": socket.gethostname()}))
    ray_engine._drop_lock_of_other_host(tmp_path)
    assert lock.exists()
    lock.write_text(json.dumps({"pid": 1, "host": "node7.example"}))
    ray_engine._drop_lock_of_other_host(tmp_path)
    assert not lock.exists()
    ray_engine._drop_lock_of_other_host(tmp_path)


def test_a_node_without_this_version_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    task = ray_engine._portable_task()
    host = socket.gethostname()
    repair = "Install it there, or add it to the node's PYTHONPATH."
    _, error, _ = task("99.0")
    assert error == f"every node must have lopsided 99.0, got {__version__} on {host}. {repair}"
    monkeypatch.setitem(sys.modules, "lopsided", None)
    _, error, _ = task("99.0")
    assert error == f"every node must have lopsided 99.0, got none on {host}. {repair}"
