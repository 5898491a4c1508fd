from __future__ import annotations

import csv
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from lopsided import cli
from lopsided.errors import RunError
from lopsided.runs.folder import Run
from serve.conftest import client_of, wait_for

if TYPE_CHECKING:
    from starlette.testclient import TestClient

    from lopsided.serve.bench import Bench

ANA = {"who": "Ana", "session": "session-of-ana"}


@pytest.fixture
def work(run: Path, pool: Path, tmp_path: Path) -> Iterator[Bench]:
    """A workbench with a pool that is read."""
    from lopsided.serve.bench import Bench

    made = Bench(run, [str(pool)], work=tmp_path / "work", device="cpu")
    made.prepare()
    wait_for(lambda: made.marking.pool.done == 21 and bool(made.marking.doubtful))
    yield made
    made.close()


def here(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Train in this process instead of one of its own, which spares its imports."""
    commands: list[list[str]] = []

    class Ended:
        pid = 0

        def __init__(self, command: list[str], **_: Any) -> None:
            commands.append(command)
            assert command[:3] == [sys.executable, "-m", "lopsided"]
            self.code = cli.run(command[3:])

        def poll(self) -> int:
            return self.code

    monkeypatch.setattr(subprocess, "Popen", Ended)
    return commands


def mark_some(client: TestClient) -> None:
    for order, label in (("likeliest", "dog"), ("doubtful", "dog")):
        asked = {**ANA, "order": order, "label": label, "number": 4 if order == "likeliest" else 1}
        for item in client.post("/v1/queue", json=asked).json()["images"]:
            mark = "yes" if order == "likeliest" else "no"
            content = {**ANA, "id": item["id"], "task": item["task"], "mark": mark, "asked": label}
            assert client.post("/v1/marks", json=content).status_code == 200


@pytest.mark.slow
def test_marks_and_corrections_train_a_run_that_can_be_compared_and_used(
    work: Bench, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = client_of(work)
    refused = client.post("/v1/refit", json={})
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "nothing")
    mark_some(client)
    before = {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()}
    here(monkeypatch)
    status = client.post("/v1/refit", json={}).json()
    assert (status["state"], status["run"]) == ("finished", "1")
    assert [(each["id"], each["current"], each["finished"]) for each in status["runs"]] == [
        ("0", True, True), ("1", False, True),
    ]  # fmt: skip
    trained = Run.open(work.work / "runs" / "1")
    assert trained.metrics is not None
    assert trained.metrics["counts"]["test"] == {"cat": 30, "dog": 13}  # The corrected label.
    assert trained.metrics["counts"]["train"] == {"cat": 30, "dog": 17}  # And four marks.
    assert {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()} == before
    found = client.post("/v1/compare", json={"old": "0", "new": "1"}).json()
    dog = found["per_class"][1]
    assert (found["images"], found["corrected"], dog["images"], dog["trained"]) == (43, 1, 13, [12, 17])
    assert found["words"].startswith("dog: 12 -> 17 training images; recall ")
    with (work.work / "runs" / "1" / "predictions.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["split"] == "test" and row["label"] == "dog"]
    assert dog["found"][1] == sum(row["predicted"] == "dog" for row in rows)
    assert dog["found"][1] - dog["found"][0] == dog["gained"] - dog["lost"]
    # The new run answers, also after a restart, and does not ask again for what it knows.
    assert client.post("/v1/use", json={"run": "1"}).json()["runs"][1]["current"]
    assert client.get("/v1/model").json()["run"] == "1"
    assert work.refits.current == "1"
    wait_for(lambda: work.marking.pool.done == 21)
    assert len(work.marking.pool.candidates) == 18 - 4
    assert client.post("/v1/use", json={"run": "0"}).json()["runs"][0]["current"]
    assert client.get("/v1/model").json()["run"] == "run"
    # A second refit uses all marks once, not those of the first beside them.
    client.post("/v1/use", json={"run": "1"})
    client.post("/v1/undo", json=ANA)
    assert client.post("/v1/refit", json={}).json()["run"] == "2"
    again = Run.open(work.work / "runs" / "2")
    assert again.metrics is not None
    assert again.metrics["counts"]["train"] == {"cat": 31, "dog": 16}
    assert again.recipe.data.more is not None
    assert [Path(table).name for table in again.recipe.data.more] == ["2-more.csv"]
    assert again.recipe.data.corrections is None


def test_a_training_that_stopped_is_told_and_continued(
    work: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    client = client_of(work)
    mark_some(client)
    commands: list[list[str]] = []

    class Sleeping(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, command: list[str], **options: Any) -> None:
            commands.append(command)
            code = "import time; print('features: 3 of 9', flush=True); time.sleep(600)"
            super().__init__([sys.executable, "-c", code], **options)

    monkeypatch.setattr(subprocess, "Popen", Sleeping)
    assert client.post("/v1/refit", json={}).json()["state"] == "running"
    refused = client.post("/v1/refit", json={})
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "running")
    wait_for(lambda: client.get("/v1/runs").json().get("words") == "features: 3 of 9")
    assert client.post("/v1/predict", files={"image": b"no"}).status_code == 200  # The server answers meanwhile.
    (work.work / "runs" / "1" / "recipe.toml").write_text("")  # As far as the training had come.
    work.refits.stop()
    assert client.get("/v1/runs").json()["state"] == "stopped"
    assert client.post("/v1/use", json={"run": "1"}).status_code == 409
    client.post("/v1/refit", json={})
    assert commands[1][-1] == "--resume"
    assert commands[1][commands[1].index("--out") + 1] == str(work.work / "runs" / "1")


def test_a_training_that_failed_tells_why_and_the_next_one_begins_anew(
    work: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = client_of(work)
    mark_some(client)

    class Failing(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, command: list[str], **options: Any) -> None:
            super().__init__([sys.executable, "-c", "print('lopsided: the data are gone.'); exit(2)"], **options)

    monkeypatch.setattr(subprocess, "Popen", Failing)
    client.post("/v1/refit", json={})
    wait_for(lambda: client.get("/v1/runs").json()["state"] == "failed")
    status = client.get("/v1/runs").json()
    assert (status["run"], status["words"]) == ("1", "lopsided: the data are gone.")
    monkeypatch.undo()
    here(monkeypatch)
    assert client.post("/v1/refit", json={}).json()["run"] == "2"
    assert client.get("/v1/runs").json()["state"] == "finished"


def test_what_is_no_run_cannot_be_used(work: Bench) -> None:
    client = client_of(work)
    for name in ("7", "../run", "0/../..", "-1", "01", "", "1 "):
        for path, content in (("/v1/use", {"run": name}), ("/v1/compare", {"old": "0", "new": name})):
            assert client.post(path, json=content).status_code in (404, 422)


def test_a_run_that_cannot_answer_is_not_chosen_for_the_next_start(work: Bench, run: Path) -> None:
    folder = work.work / "runs" / "1"
    folder.mkdir(parents=True)
    shutil.copy(run / "metrics.json", folder)
    answer = client_of(work).post("/v1/use", json={"run": "1"})
    assert answer.status_code == 422
    assert work.refits.current == "0"


def test_a_training_of_a_server_that_was_killed_goes_on_and_is_waited_for(work: Bench, run: Path) -> None:
    folder = work.work / "runs" / "1"
    folder.mkdir(parents=True)
    shutil.copy(run / "recipe.toml", folder)
    script = "import sys; from lopsided import files\nwith files.lock(sys.argv[1]): print(flush=True); input()"
    client = client_of(work)
    with subprocess.Popen(
        [sys.executable, "-c", script, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        other.stdout.readline()
        told = client.get("/v1/runs").json()
        started = client.post("/v1/refit", json={})
        other.communicate(b"\n")
    assert (told["state"], told["run"]) == ("running", "1")
    assert (started.status_code, started.json()["error"]["code"]) == (409, "running")
    assert client.get("/v1/runs").json()["state"] == "stopped"


def test_a_choice_of_a_run_that_is_gone_is_the_first_one(work: Bench) -> None:
    for text in ('{"run": "9"}', "nonsense", '{"run": "../../x"}', "[]"):
        (work.work / "current.json").write_text(text)
        assert work.refits.current == "0"


def test_runs_without_an_image_in_common_are_not_compared(run: Path, tmp_path: Path) -> None:
    from lopsided.serve.comparison import compare_runs

    other = tmp_path / "other"
    shutil.copytree(run, other)
    same = compare_runs(run, other)
    assert [row["gained"] + row["lost"] for row in same["per_class"]] == [0, 0]
    text = (other / "predictions.csv").read_text()
    (other / "predictions.csv").write_text(text.replace("cat/", "x/").replace("dog/", "y/"))
    with pytest.raises(RunError, match="in common"):
        compare_runs(run, other)
    metrics = json.loads((other / "metrics.json").read_text())
    (other / "metrics.json").unlink()
    with pytest.raises(RunError, match="not finished"):
        compare_runs(run, other)
    assert metrics["classes"] == ["cat", "dog"]
