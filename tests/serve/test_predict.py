from __future__ import annotations

import base64
import io
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from PIL import Image

import lopsided
from lopsided.errors import InputError
from lopsided.inference.engine import Engine
from serve.conftest import wait_for

if TYPE_CHECKING:
    from starlette.testclient import TestClient

    from lopsided.serve.bench import Bench


def sent(*paths: Path) -> list[tuple[str, tuple[str, bytes, str]]]:
    return [("image", (path.name, path.read_bytes(), "image/png")) for path in paths]


def some(photos: Path) -> list[Path]:
    return [photos / "cat" / "003.png", photos / "dog" / "004.png", photos / "cat" / "005.png"]


def test_a_form_and_json_get_the_answers_that_the_command_gives(client: TestClient, run: Path, photos: Path) -> None:
    expected = lopsided.open(run, device="cpu").predict(some(photos))
    form = client.post("/v1/predict", files=sent(*some(photos))).json()
    texts = [base64.b64encode(path.read_bytes()).decode() for path in some(photos)]
    other = client.post("/v1/predict", json={"images": texts}).json()
    assert [image["predicted"] for image in form["images"]] == list(expected.labels)
    for answer in (form, other):  # The last digits depend on the size of a batch.
        p = [[image["probabilities"][name] for name in expected.classes] for image in answer["images"]]
        assert np.allclose(p, expected.probabilities, atol=1e-6)
    assert expected.typicality is not None
    assert np.allclose([image["typicality"] for image in form["images"]], expected.typicality, atol=1e-6)
    assert form["run"] == "run"


def test_what_is_asked_for_comes_along_and_nothing_else(client: TestClient, photos: Path) -> None:
    image = sent(some(photos)[1])
    (bare,) = client.post("/v1/predict", files=image).json()["images"]
    assert set(bare) == {"predicted", "probabilities", "typicality", "unfamiliar"}
    asked = {"map": "true", "nearest": "5", "picture": "true", "decide": "sets:0.9"}
    (full,) = client.post("/v1/predict", files=image, data=asked).json()["images"]
    assert set(full) - set(bare) == {"map", "nearest", "picture", "set"}
    for name in ("map", "picture"):
        head, _, content = full[name].partition(",")
        assert head == "data:image/webp;base64"
        assert Image.open(io.BytesIO(base64.b64decode(content))).format == "WEBP"
    # The image is known, so it is the nearest itself.
    assert full["nearest"][0]["similarity"] == pytest.approx(1, abs=1e-3)
    assert full["nearest"][0]["label"] == "dog"
    assert len(full["nearest"]) == 5
    shown = client.get(f"/images/{full['nearest'][0]['id']}")
    assert Image.open(io.BytesIO(shown.content)).size == (12, 12)


def test_an_unreadable_image_does_not_stop_the_others(client: TestClient, photos: Path) -> None:
    files = [("image", ("a.png", b"no image", "image/png")), *sent(some(photos)[0])]
    first, second = client.post("/v1/predict", files=files).json()["images"]
    assert first == {"unreadable": "not an image of a supported format"}
    assert second["predicted"] == "cat"


def test_names_of_the_client_reach_no_file(client: TestClient, photos: Path, tmp_path: Path) -> None:
    name = f"../../../../{tmp_path}/written.png"
    content = some(photos)[0].read_bytes()
    answer = client.post("/v1/predict", files=[("image", (name, content, "image/png"))])
    assert answer.status_code == 200
    assert "written" not in answer.text
    assert list(tmp_path.iterdir()) == []


def test_rules_and_shares_are_those_of_the_command(client: TestClient, run: Path, photos: Path) -> None:
    chosen = {"decide": "threshold:dog=0.01", "prevalence": "cat=0.5,dog=0.5"}
    expected = lopsided.open(run, device="cpu").predict(some(photos), **chosen)
    got = client.post("/v1/predict", files=sent(*some(photos)), data=chosen).json()
    assert [image["predicted"] for image in got["images"]] == list(expected.labels)
    p = [[image["probabilities"][name] for name in expected.classes] for image in got["images"]]
    assert np.allclose(p, expected.probabilities, atol=1e-6)


def test_no_rule_opens_a_file(client: TestClient, photos: Path, tmp_path: Path) -> None:
    table = tmp_path / "costs.csv"
    table.write_text(",cat,dog\ncat,0,1\ndog,9,0\n")
    answer = client.post("/v1/predict", files=sent(some(photos)[0]), data={"decide": f"cost:{table}"})
    assert answer.status_code == 422
    assert answer.json()["error"]["code"] == "invalid"


def test_deciding_again_counts_the_held_back_images(client: TestClient, bench: Bench, run: Path) -> None:
    from lopsided.runs.reopen import open_use

    p = [[0.9, 0.1], [0.4, 0.6]]
    got = client.post("/v1/decide", json={"decide": "threshold:dog=0.05", "probabilities": p}).json()
    assert [image["predicted"] for image in got["images"]] == ["dog", "dog"]
    held, use = bench.served.held, open_use(run, bench.served.card, "threshold:dog=0.05")
    assert held is not None
    decided = use.decision.decide(held.probabilities)
    dog = got["counts"]["per_class"][1]
    assert dog["images"] == 12
    assert dog["found"] == int(((held.labels == 1) & (decided == 1)).sum())
    assert dog["false_alarms"] == int(((held.labels == 0) & (decided == 1)).sum())
    assert got["counts"]["kind"] == "out-of-fold"
    asked = client.post("/v1/decide", json={"decide": "abstain:0.000001"}).json()["counts"]["per_class"]
    assert [row["asked"] + row["found"] + row["false_alarms"] for row in asked] >= [0, 0]
    assert sum(row["asked"] for row in asked) > 0


@pytest.mark.parametrize(
    ("content", "status", "code"),
    [
        ({"images": []}, 422, "invalid"),
        ({"images": ["§"]}, 422, "no_base64"),
        ({"images": ["data:image/png;base64,aaaa"]}, 422, "no_base64"),
        ({"images": "aaaa"}, 422, "invalid"),
        ({"images": ["aaaa"], "paths": ["/etc/passwd"]}, 422, "invalid"),
        ({"images": ["aaaa"], "nearest": 10**6}, 422, "invalid"),
        ({"images": ["aaaa"], "decide": "nonsense"}, 422, "invalid"),
        ({"images": ["aaaa"], "prevalence": "cat=2"}, 422, "invalid"),
        ({"images": ["aaaa"] * 65}, 413, "too_many"),
        ([], 422, "invalid"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_shape(client: TestClient, content: Any, status: int, code: str) -> None:
    answer = client.post("/v1/predict", json=content)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert error["code"] == code
    assert error["message"].endswith((".", "?"))


def test_concurrent_requests_share_batches(
    bench: Bench, client: TestClient, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Engine, "is_fast", False)  # So that one thread takes all images.
    gate, begun = threading.Event(), threading.Event()

    def hold() -> None:
        begun.set()
        gate.wait(120)

    bench.worker.do(hold)  # The model is busy, so that requests pile up.
    assert begun.wait(60)
    before = bench.counters.batches.lines()[-1]
    files = sent(some(photos)[0])
    with ThreadPoolExecutor(6) as pool:
        answers = [pool.submit(client.post, "/v1/predict", files=files) for _ in range(6)]
        wait_for(lambda: bench.worker.waiting == 6)
        gate.set()
        got = [answer.result().json() for answer in answers]
    assert [each["images"][0]["predicted"] for each in got] == ["cat"] * 6
    assert int(bench.counters.batches.lines()[-1].split()[-1]) == int(before.split()[-1]) + 1


def test_a_long_job_lets_requests_through(bench: Bench, client: TestClient, photos: Path) -> None:
    steps, stop = [], threading.Event()

    def forever() -> Any:
        while not stop.is_set():
            steps.append(0)
            yield

    bench.worker.begin(forever())
    try:
        assert client.post("/v1/predict", files=sent(some(photos)[0])).status_code == 200
    finally:
        stop.set()
    assert steps


def test_an_error_of_the_model_reaches_the_caller_and_the_thread_goes_on(bench: Bench, client: TestClient) -> None:
    def fail() -> None:
        raise InputError("Out of luck.")

    with pytest.raises(InputError, match="luck"):
        bench.worker.do(fail).result(60)
    assert bench.worker.do(lambda: 7).result(60) == 7


def test_what_is_counted_is_read_by_prometheus(client: TestClient, photos: Path) -> None:
    client.post("/v1/predict", files=sent(some(photos)[0]))
    text = client.get("/metrics").text
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(values['lopsided_images_total{predicted="cat"}']) >= 1
    assert float(values['lopsided_requests_total{route="predict",status="200"}']) >= 1
    assert values['lopsided_request_seconds_bucket{le="+Inf"}'] == values["lopsided_request_seconds_count"]
    assert any(name.startswith('lopsided_model{run="run"') for name in values)


def test_the_model_is_described(client: TestClient) -> None:
    facts = client.get("/v1/model").json()
    assert facts["classes"] == ["cat", "dog"]
    assert facts["rarest"] == "dog"
    assert facts["decide"] == "balanced"
    assert 0 < facts["unfamiliar_level"] < 1
    assert "dog: finds" in facts["headlines"][0]
    assert client.get("/healthz").json() == {"status": "ok"}


def test_the_description_names_every_route_and_option(client: TestClient) -> None:
    found = client.get("/openapi.json").json()
    assert {"/v1/predict", "/v1/decide", "/v1/model", "/healthz", "/metrics"} <= set(found["paths"])
    body = found["paths"]["/v1/predict"]["post"]["requestBody"]["content"]
    assert {"image", "decide", "prevalence", "map", "nearest"} <= set(
        body["multipart/form-data"]["schema"]["properties"]
    )
    assert "images" in body["application/json"]["schema"]["properties"]
