from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from lopsided.errors import InputError, RunError
from serve.conftest import client_of, wait_for

if TYPE_CHECKING:
    from starlette.testclient import TestClient

    from lopsided.serve.bench import Bench
    from lopsided.serve.marking import Marking

ANA = {"who": "Ana", "session": "session-of-ana"}
BEN = {"who": "Ben", "session": "session-of-ben"}


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(scope="module")
def scored(bench: Bench, pool: Path) -> Any:
    """The pool, scored once."""
    from lopsided.runs.find import labelled_images
    from lopsided.serve.pool import Pool, doubtful

    found = Pool([str(pool)])
    labelled = labelled_images(bench.served.folder)
    steps = found.score(bench.served, labelled, bench.gallery)
    bench.worker.do(lambda: list(steps)).result(60)
    return found, doubtful(bench.served, labelled, bench.gallery)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def marking(bench: Bench, scored: Any, clock: Clock, tmp_path: Path) -> Marking:
    from lopsided.serve.journal import Journal
    from lopsided.serve.marking import Marking

    made = Marking(bench.served, scored[0], Journal(tmp_path), clock)
    made.doubtful = scored[1]
    return made


@pytest.fixture
def client(bench: Bench, marking: Marking, monkeypatch: pytest.MonkeyPatch) -> TestClient:
    monkeypatch.setattr(bench, "marking", marking)
    return client_of(bench)


def ask(client: TestClient, who: dict[str, str] = ANA, order: str = "likeliest", number: int = 3) -> list[Any]:
    answer = client.post("/v1/queue", json={**who, "order": order, "label": "dog", "number": number})
    assert answer.status_code == 200, answer.text
    return list(answer.json()["images"])


def mark(client: TestClient, item: Any, mark: str, who: dict[str, str] = ANA, **further: str) -> Any:
    asked = {**who, "id": item["id"], "task": item["task"], "mark": mark, "asked": "dog", **further}
    return client.post("/v1/marks", json=asked)


def table(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def test_the_pool_leaves_out_what_is_known_unreadable_or_the_same(client: TestClient) -> None:
    counts = client.get("/v1/marks").json()["pool"]
    assert counts == {"total": 21, "done": 21, "candidates": 18, "known": 1, "unreadable": 1, "same": 1}


def test_each_order_gives_its_most_useful_images_first(client: TestClient) -> None:
    likely = ask(client, order="likeliest", number=18)
    p = [item["probabilities"]["dog"] for item in likely]
    assert p == sorted(p, reverse=True)
    assert [item["predicted"] for item in likely[:6]] == ["dog"] * 6
    typical = [item["typicality"] for item in ask(client, order="unusual", number=18)]
    assert typical == sorted(typical)
    first = ask(client, order="unsure", number=18)
    assert {item["id"] for item in first} == {item["id"] for item in likely}
    assert first[0]["id"] not in (likely[0]["id"], likely[-1]["id"])  # Neither of the two surest.
    doubt = ask(client, order="doubtful", number=1)[0]
    assert (doubt["name"], doubt["label"], doubt["suggested"]) == ("cat/wrong.png", "cat", "dog")


def test_no_answer_holds_a_path(client: TestClient, pool: Path, photos: Path) -> None:
    for order in ("likeliest", "doubtful"):
        text = json.dumps(ask(client, order=order, number=18))
        assert str(pool.parent) not in text
        assert str(photos.parent) not in text


def test_two_people_never_get_the_same_image(client: TestClient) -> None:
    seen: list[str] = []
    for turn in range(9):
        who = (ANA, BEN)[turn % 2]
        for item in ask(client, who, number=2):
            assert mark(client, item, "skip", who).status_code == 200
            seen.append(item["id"])
    assert len(seen) == len(set(seen)) == 18
    assert ask(client) == []


def test_a_lent_image_is_given_to_nobody_else_until_its_time_is_over(client: TestClient, clock: Clock) -> None:
    (mine,) = ask(client, ANA, number=1)
    assert mine not in ask(client, BEN, number=17)
    assert ask(client, ANA, number=1) == [mine]  # A page that is loaded again.
    refused = mark(client, mine, "yes", BEN)
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "lent")
    clock.now += 601
    assert ask(client, BEN, number=1) == [mine]
    assert mark(client, mine, "yes", BEN).status_code == 200
    late = mark(client, mine, "no", ANA)
    assert (late.status_code, late.json()["error"]["message"]) == (409, "Ben has marked this image meanwhile.")


def test_a_mark_that_is_sent_twice_is_one_mark(client: TestClient) -> None:
    (item,) = ask(client, number=1)
    assert mark(client, item, "yes").json()["number"] == mark(client, item, "yes").json()["number"] == 1
    assert mark(client, item, "no").status_code == 409


def test_undo_brings_the_image_back_to_the_one_who_marked_it(client: TestClient) -> None:
    first, second = ask(client, number=2)
    mark(client, first, "yes")
    mark(client, second, "no")
    assert client.post("/v1/undo", json=BEN).status_code == 409
    back = client.post("/v1/undo", json=ANA).json()
    assert back["image"] == second
    assert back["counts"]["by_mark"] == {"yes": 1}
    assert second not in ask(client, BEN, number=17)
    mark(client, second, "skip")
    assert client.get("/v1/marks").json()["counts"]["by_mark"] == {"yes": 1, "skip": 1}


def test_marks_become_the_tables_that_fit_reads(client: TestClient, pool: Path) -> None:
    yes, no, skip = ask(client, number=3)
    mark(client, yes, "yes")
    mark(client, no, "no")
    mark(client, skip, "skip")
    wrong, right = ask(client, order="doubtful", number=2)
    mark(client, wrong, "no")
    mark(client, right, "yes")
    rows = table(client.get("/v1/marks.csv").text)
    assert [(row["label"], row["mark"], row["who"]) for row in rows] == [
        ("dog", "yes", "Ana"), ("cat", "no", "Ana"), ("", "skip", "Ana"),
    ]  # fmt: skip
    assert all(Path(row["path"]).is_file() and Path(row["path"]).is_relative_to(pool) for row in rows)
    (correction,) = table(client.get("/v1/corrections.csv").text)
    assert (correction["path"], correction["label"], correction["was"]) == ("cat/wrong.png", "dog", "cat")


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({"id": "../../etc/passwd"}, 404),
        ({"id": "aaaa"}, 404),
        ({"task": "files"}, 422),
        ({"mark": "perhaps"}, 422),
        ({"asked": "horse"}, 422),
        ({"label": "horse"}, 422),
        ({"label": "dog"}, 422),
        ({"who": ""}, 422),
        ({"who": "a\nb"}, 422),
        ({"who": "x" * 61}, 422),
        ({"who": "=cmd()"}, 422),
        ({"session": "a b"}, 422),
        ({"path": "/etc/passwd"}, 422),
    ],
)
def test_a_mark_that_does_not_fit_is_refused(client: TestClient, change: dict[str, str], status: int) -> None:
    (item,) = ask(client, number=1)
    answer = client.post(
        "/v1/marks", json={**ANA, "id": item["id"], "task": "pool", "mark": "no", "asked": "dog", **change}
    )
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["message"]
    assert client.get("/v1/marks").json()["counts"]["marks"] == 0


def test_a_queue_that_does_not_fit_is_refused(client: TestClient) -> None:
    for change in ({"order": "best"}, {"label": "horse"}, {"number": 0}, {"number": 51}):
        asked = {**ANA, "order": "likeliest", "label": "dog", **change}
        assert client.post("/v1/queue", json=asked).status_code == 422


def test_a_journal_survives_a_kill_at_any_byte(marking: Marking, client: TestClient, tmp_path: Path) -> None:
    from lopsided.serve.journal import Journal

    for item in ask(client, number=3):
        mark(client, item, "yes")
    client.post("/v1/undo", json=ANA)
    whole = marking.journal.path.read_bytes()
    for cut in range(0, len(whole) + 1, 7):
        folder = tmp_path / "cut"
        folder.mkdir(exist_ok=True)
        (folder / "journal.jsonl").write_bytes(whole[:cut])
        lines = [line for text in whole[:cut].decode().splitlines() if (line := _parsed(text))]
        undone = {line.get("undo") for line in lines}
        journal = Journal(folder)
        assert len(journal) == sum("image" in line and line["number"] not in undone for line in lines)
        before = len(journal)
        journal.add(_mark("new"))
        assert len(Journal(folder)) == before + 1


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _mark(image: str) -> Any:
    from lopsided.serve.journal import Mark

    return Mark("pool", image, "/path", "yes", "dog", "dog", "Ana", "session-of-ana")


def test_a_mark_is_on_the_disk_before_the_answer(
    client: TestClient, marking: Marking, monkeypatch: pytest.MonkeyPatch
) -> None:
    import os

    synced: list[bytes] = []
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append(marking.journal.path.read_bytes()))
    (item,) = ask(client, number=1)
    assert mark(client, item, "yes").status_code == 200
    assert item["id"] in synced[-1].decode()


def test_a_full_disk_is_told_and_nothing_is_counted(
    client: TestClient, marking: Marking, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lopsided import files

    def fail(*_: object, **__: object) -> None:
        raise RunError("cannot write journal.jsonl: no space left on device. Free some disk space.")

    (item,) = ask(client, number=1)
    with monkeypatch.context() as patch:
        patch.setattr(files, "append_line", fail)
        answer = mark(client, item, "yes")
    assert (answer.status_code, answer.json()["error"]["code"]) == (507, "not_saved")
    assert "Free some disk space" in answer.json()["error"]["message"]
    assert client.get("/v1/marks").json()["counts"]["marks"] == 0
    assert mark(client, item, "yes").status_code == 200


def test_a_damaged_journal_keeps_its_good_lines(tmp_path: Path) -> None:
    from lopsided.serve.journal import Journal

    journal = Journal(tmp_path)
    journal.add(_mark("a"))
    with journal.path.open("a") as file:
        file.write('{"number": "x"}\n[1, 2]\nnonsense\n{"number": 9, "undo": 1e999}\n{"number":3,"task":5}\n\x00\n')
    journal.add(_mark("b"))
    assert {each.image for each in Journal(tmp_path).marks()} == {"a", "b"}


def test_a_journal_of_another_format_is_refused(tmp_path: Path) -> None:
    from lopsided.serve.journal import Journal

    (tmp_path / "journal.jsonl").write_text('{"format": 2}\n')
    with pytest.raises(RunError, match="format"):
        Journal(tmp_path)


def test_a_second_server_does_not_write_the_same_journal(run: Path, bench: Bench) -> None:
    from lopsided.serve.bench import Bench as Another

    with pytest.raises(RunError, match="work"):
        Another(run, device="cpu")


def test_a_pool_elsewhere_or_too_large_is_refused(pool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lopsided.serve import pool as pools

    with pytest.raises(InputError, match="files"):
        pools.Pool(["s3://bucket/images"])
    monkeypatch.setattr(pools, "MOST", 5)
    with pytest.raises(InputError, match="lopsided find"):
        pools.Pool([str(pool)])


def test_the_server_reads_its_pool_by_itself(run: Path, pool: Path, tmp_path: Path) -> None:
    from lopsided.serve.bench import Bench as Another

    another = Another(run, [str(pool)], work=tmp_path / "work", device="cpu")
    try:
        another.prepare()
        wait_for(lambda: another.marking.pool.done == 21)
        assert len(ask(client_of(another), number=50)) == 18
    finally:
        another.close()
    assert not (tmp_path / "work" / ".lock").exists()


@pytest.mark.parametrize(
    ("task", "mark", "label", "expected"),
    [
        ("pool", "yes", "", "a"),
        ("pool", "no", "", ""),  # Of three classes, "no" does not say which one it is.
        ("pool", "no", "c", "c"),
        ("pool", "skip", "", ""),
        ("labels", "yes", "", "b"),
        ("labels", "no", "", "c"),
        ("labels", "no", "a", "a"),
        ("labels", "skip", "", ""),
    ],
)
def test_of_three_classes_a_mark_gives_the_one_that_it_tells(
    tmp_path: Path, task: Any, mark: Any, label: str, expected: str
) -> None:
    from types import SimpleNamespace

    import numpy as np

    from lopsided.serve.journal import Journal
    from lopsided.serve.marking import Marking
    from lopsided.serve.pool import Candidate, Pool
    from lopsided.serve.requests import MarkJson

    served: Any = SimpleNamespace(classes=("a", "b", "c"))
    made = Marking(served, Pool([]), Journal(tmp_path))
    made.pool.candidates = [Candidate("pool", "1", "/p", np.ones(3) / 3)]
    made.doubtful = [Candidate("labels", "2", "/l", np.ones(3) / 3, name="n", label="b", suggested="c")]
    name = "1" if task == "pool" else "2"
    made.mark(MarkJson(id=name, task=task, mark=mark, asked="a", label=label, **ANA))
    (written,) = Journal(tmp_path).marks()
    assert written.label == expected
    assert len(made.journal.corrections()) == (task == "labels" and mark == "no")


def test_marks_have_the_groups_of_the_table_of_the_pool(run: Path, pool: Path, tmp_path: Path) -> None:
    from lopsided.serve.bench import Bench
    from lopsided.serve.journal import Journal

    patients = pool / "patients.csv"
    patients.write_text("path,group\ndog/301.png,p1\ndog/302.png,p2\n")
    try:
        made = Bench(run, [str(patients), str(pool / "cat")], work=tmp_path / "work", device="cpu")
    finally:
        patients.unlink()
    try:
        made.prepare()
        wait_for(lambda: made.marking.pool.done == 14)
        client = client_of(made)
        for item in ask(client, number=50):
            assert mark(client, item, "yes").status_code == 200
        rows = table(client.get("/v1/marks.csv").text)
    finally:
        made.close()
    found = {Path(row["path"]).relative_to(pool).as_posix(): row["group"] for row in rows}
    assert len(found) == 14
    assert {name: group for name, group in found.items() if group} == {"dog/301.png": "p1", "dog/302.png": "p2"}
    assert Journal(tmp_path / "work").marks_table("patient").startswith("path,label,mark,who,patient\n")


def test_a_journal_from_before_groups_keeps_its_marks(marking: Marking, client: TestClient) -> None:
    from lopsided.serve.journal import Journal

    mark(client, ask(client)[0], "yes")
    path = marking.journal.path
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps({k: v for k, v in line.items() if k != "group"}) + "\n" for line in lines))
    assert len(Journal(path.parent)) == 1
    assert Journal(path.parent).marks_table().startswith("path,label,mark,who\n")
