"""A model with columns of a table beside each image: the interface, the page, marks and another training take them."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from PIL import Image

import lopsided
from browser import browser  # noqa: F401  A fixture.
from lopsided import cli
from lopsided.models.machine import threads
from serve.conftest import QUICK, client_of, running, wait_for

if TYPE_CHECKING:
    from playwright.sync_api import Browser
    from starlette.testclient import TestClient

    from lopsided.serve.bench import Bench

SESSION = {"who": "Ana", "session": "session-of-a-test"}


def write_images(folder: Path, table: str, start: int, numbers: dict[str, int]) -> Path:
    """Images of noise, of which the column age tells the class; sex says nothing."""
    rows = []
    for label, number in numbers.items():
        for i in range(start, start + number):
            random = np.random.default_rng([start, len(rows)])
            name = f"{label}{i}.png"
            Image.fromarray(random.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(folder / name)
            age = {"cat": 4, "dog": 9}[label] + random.normal() / 2
            rows.append({"path": name, "label": label, "age": f"{age:.2f}", "sex": "fm"[i % 2], "home": f"h{i}"})
    with (folder / table).open("w", newline="") as file:
        writer = csv.DictWriter(file, ["path", "label", "age", "sex", "home"])
        writer.writeheader()
        writer.writerows(rows)
    return folder / table


@pytest.fixture(scope="module")
def pets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table, a pool, and a run whose model takes age and sex beside each image."""
    folder = tmp_path_factory.mktemp("pets")
    table = write_images(folder, "pets.csv", 0, {"cat": 30, "dog": 14})
    write_images(folder, "pool.csv", 100, {"cat": 4, "dog": 4})
    with threads(1):
        assert cli.run(["fit", str(table), *QUICK, "columns=age,sex", "--out", str(folder / "run")]) == 0
    return folder


@pytest.fixture(scope="module")
def bench(pets: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    from lopsided.serve.bench import Bench

    work = tmp_path_factory.mktemp("work") / "work"
    bench = Bench(pets / "run", [str(pets / "pool.csv")], work=work, device="cpu")
    bench.prepare()
    wait_for(lambda: bench.served.neighbours is not None and bench.marking.pool.done == bench.marking.pool.total)
    yield bench
    bench.close()


@pytest.fixture
def client(bench: Bench) -> TestClient:
    return client_of(bench)


def images(pets: Path, number: int) -> list[tuple[str, bytes]]:
    return [("image", (pets / f"cat{i}.png").read_bytes()) for i in range(number)]


def probabilities(answer: Any) -> list[float]:
    return [image["probabilities"]["dog"] for image in answer.json()["images"]]


def test_columns_of_a_form_and_of_json_are_those_of_a_table(client: TestClient, pets: Path) -> None:
    import base64

    table = pets / "asked.csv"
    rows = [{"age": "4.5", "sex": "f"}, {"age": "9", "sex": ""}]
    with table.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["path", "age", "sex"])
        writer.writeheader()
        writer.writerows([{"path": f"cat{i}.png", **row} for i, row in enumerate(rows)])
    expected = lopsided.open(pets / "run", device="cpu").predict(table)
    given = [{"age": 4.5, "sex": "f"}, {"age": "9", "sex": None}]
    form = client.post("/v1/predict", files=images(pets, 2), data={"columns": json.dumps(given)})
    texts = [base64.b64encode(content).decode() for _, content in images(pets, 2)]
    other = client.post("/v1/predict", json={"images": texts, "columns": given})
    dog = expected.classes.index("dog")
    assert np.allclose(probabilities(form), expected.probabilities[:, dog], atol=1e-6)
    assert np.allclose(probabilities(other), expected.probabilities[:, dog], atol=1e-6)


def test_one_object_holds_for_all_images_and_decides(client: TestClient, pets: Path) -> None:
    for age, said in ((4, "cat"), (9, "dog")):
        columns = json.dumps({"age": age, "sex": None})
        asked = {"columns": columns, "map": "true", "nearest": "3", "picture": "true"}
        found = client.post("/v1/predict", files=images(pets, 2), data=asked).json()["images"]
        assert [image["predicted"] for image in found] == [said] * 2
        assert all(image["map"] and len(image["nearest"]) == 3 for image in found)


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        (None, "columns must name age, sex for each image, got none"),
        ({"age": 4}, "columns must name age, sex for each image, got age"),
        ({"age": 4, "sex": "f", "path": "/etc/passwd"}, "got age, sex, path"),
        ([{"age": 4, "sex": "f"}], "an object for each of the 2 images, got 1"),
        ({"age": "old", "sex": "f"}, "column age must hold numbers"),
        ({"age": True, "sex": "f"}, "columns"),
        ({"age": {"$gt": 0}, "sex": "f"}, "columns"),
        ({"age": 10**400, "sex": "f"}, "column age must hold numbers"),
        ("no JSON", "must be JSON"),
        ("[" * 100_000, "must be JSON"),
    ],
)
def test_columns_that_do_not_fit_are_refused(client: TestClient, pets: Path, columns: Any, words: str) -> None:
    text = columns if isinstance(columns, str) else json.dumps(columns)
    data = {} if columns is None else {"columns": text[:60_000]}
    answer = client.post("/v1/predict", files=images(pets, 2), data=data)
    assert (answer.status_code, answer.json()["error"]["code"]) == (422, "invalid")
    assert words in answer.json()["error"]["message"]


def test_the_columns_are_described(client: TestClient) -> None:
    age, sex = client.get("/v1/model").json()["columns"]
    assert age == {"kind": "number", "name": "age"}
    assert sex == {"kind": "category", "name": "sex", "values": ["f", "m"]}
    bodies = client.get("/openapi.json").json()["paths"]["/v1/predict"]["post"]["requestBody"]["content"]
    for body in bodies.values():
        assert "columns" in body["schema"]["properties"]


@pytest.mark.slow
def test_the_page_asks_for_the_columns(browser: Browser, bench: Bench, pets: Path) -> None:  # noqa: F811
    with running(bench) as port:
        context = browser.new_context(viewport={"width": 400, "height": 800})
        page = context.new_page()
        complaints: list[str] = []
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(f"http://127.0.0.1:{port}/#try")
        page.wait_for_selector("#beside:not([hidden])")
        page.get_by_role("spinbutton", name="age").fill("9")
        page.get_by_role("combobox", name="sex").select_option("f")
        page.set_input_files("#pick-files", [str(pets / "cat0.png"), str(pets / "cat1.png")])
        page.wait_for_selector('#try-status:has-text("2 of 2")')
        assert page.locator(".answer .said").all_text_contents() == ["dog", "dog"]
        page.get_by_role("spinbutton", name="age").fill("4")
        page.get_by_role("spinbutton", name="age").press("Enter")  # All images are asked for again.
        page.wait_for_selector('.answer .said:has-text("cat") >> nth=1')
        assert page.evaluate("() => document.documentElement.scrollWidth") <= 400
        context.close()
    assert complaints == []


def test_the_command_sends_the_columns_of_its_table(bench: Bench, pets: Path, tmp_path: Path) -> None:
    here, there = tmp_path / "here.csv", tmp_path / "there.csv"
    assert cli.run(["predict", str(pets / "run"), str(pets / "pool.csv"), "--out", str(here), "--quiet"]) == 0
    with running(bench) as port:
        command = ["predict", "--url", f"http://127.0.0.1:{port}", "--quiet"]
        assert cli.run([*command, str(pets / "pool.csv"), "--out", str(there)]) == 0
        assert cli.run([*command, str(pets / "cat0.png")]) == 2
    rows = [list(csv.DictReader(path.read_text().splitlines())) for path in (here, there)]
    assert [row["predicted"] for row in rows[0]] == [row["predicted"] for row in rows[1]]
    assert np.allclose([float(row["p:dog"]) for row in rows[0]], [float(row["p:dog"]) for row in rows[1]], atol=1e-6)


def test_a_pool_without_the_columns_is_refused_at_the_start(pets: Path, tmp_path: Path) -> None:
    from lopsided.serve.bench import Bench

    with pytest.raises(lopsided.errors.DataError, match="the columns age, sex must stand beside each image"):
        Bench(pets / "run", [str(pets)], work=tmp_path / "work", device="cpu")


def test_marks_carry_the_columns_into_the_next_training(client: TestClient, pets: Path, tmp_path: Path) -> None:
    asked = {**SESSION, "order": "likeliest", "label": "dog", "number": 8}
    queue = client.post("/v1/queue", json=asked).json()["images"]
    assert [image["predicted"] for image in queue] == ["dog"] * 4 + ["cat"] * 4  # By the ages of the pool's table.
    for image in queue:
        mark = {"id": image["id"], "task": "pool", "mark": "yes" if image["name"].startswith("dog") else "no"}
        assert client.post("/v1/marks", json={**SESSION, **mark, "asked": "dog"}).status_code == 200
    rows = list(csv.DictReader(client.get("/v1/marks.csv").text.splitlines()))
    assert {(row["label"], float(row["age"]) > 6.5) for row in rows} == {("dog", True), ("cat", False)}
    assert {row["sex"] for row in rows} == {"f", "m"}
    marks = tmp_path / "marks.csv"
    marks.write_text(client.get("/v1/marks.csv").text)
    fit = ["fit", str(pets / "pets.csv"), *QUICK, "columns=age,sex", "--more", str(marks), "--allow-outside"]
    assert cli.run([*fit, "--out", str(tmp_path / "run")]) == 0
    assert json.loads((tmp_path / "run" / "model.json").read_text())["beside"][0]["name"] == "age"
