"""Pools on a Ray cluster: the answers of one machine, even if a node is killed."""

from __future__ import annotations

import csv
import json
import signal
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.torch import save_file

from lopsided import __version__
from lopsided.cli import run as run_command
from lopsided.errors import MissingDependencyError, RunError
from lopsided.inference.neighbours import Known
from lopsided.inference.pool import Pack, Scores, find_images, packs
from lopsided.inference.scorer import Scorer
from lopsided.models.encoders import build_encoder
from lopsided.recipe import named_recipe
from lopsided.runs.engines import ray_engine, ray_map
from lopsided.runs.engines.ray_map import RayMap, make_scorer, score_row
from lopsided.runs.reopen import open_model
from ray_nodes import cluster, with_ray
from tiny import write_model, write_photos

__all__ = ["cluster"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_photos(tmp_path_factory.mktemp("data") / "pool", {"cat": 40, "dog": 20})
    (folder / "cat" / "003.png").write_bytes(b"")
    return folder


def content_of(model: Path) -> dict[str, bytes]:
    return {name: (model / name).read_bytes() for name in ("model.json", "model.safetensors")}


def assert_same(found: Iterable[Scores], expected: Iterable[Scores]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert (one.pack, one.reasons, one.digests) == (other.pack, other.reasons, other.digests)
        np.testing.assert_allclose(one.probabilities, other.probabilities, atol=1e-6)
        assert one.nearness is not None
        assert other.nearness is not None
        np.testing.assert_allclose(one.nearness, other.nearness, atol=1e-6)


def test_a_node_sends_what_the_driver_would_compute(model: Path, pool: Path) -> None:
    known = np.eye(2, open_model(model, "cpu")[1].features, dtype=np.float32)
    paths = tuple(find_images([pool])[1])[:9]
    scorer = make_scorer(content_of(model), (known[:1], known[1:]), False)
    row = score_row(scorer, [str(path).encode() for path in paths], [[]] * len(paths))
    found = ray_map._scores(Pack(0, paths), {**row, "host": "here"})
    scorer = Scorer(*open_model(model, "cpu"), known=Known(known[:1], known[1:]))
    assert_same([found], scorer.map([Pack(0, paths)]))


def test_a_node_that_does_not_see_the_images_is_named(pool: Path) -> None:
    path = pool / "cat" / "000.png"
    row = {"reasons": ["no such file or directory"], "host": "node7", "digests": [""]}
    with pytest.raises(RunError, match=r"^The node node7 does not see .*000\.png\. Images must be at the same path"):
        ray_map._scores(Pack(0, (path,)), row)


def test_without_the_packages_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    find = ray_engine.importlib.util.find_spec
    monkeypatch.setattr(ray_engine.importlib.util, "find_spec", lambda name: None if name == "pyarrow" else find(name))
    with pytest.raises(
        MissingDependencyError, match=r"^--engine ray needs the package pyarrow, which is not installed"
    ):
        RayMap("auto", tmp_path)


@pytest.fixture
def connection(cluster: Any) -> Iterator[None]:
    """Connect once: the commands share the workers, whose imports take seconds."""
    import ray

    before = signal.getsignal(signal.SIGTERM)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()
    signal.signal(signal.SIGTERM, before)


@with_ray
@pytest.mark.filterwarnings("ignore")  # Ray Data warns of its own deprecated settings and of a cluster that shrinks.
def test_two_nodes_of_which_one_is_killed_give_the_answers_of_one_machine(
    cluster: Any,
    model: Path,
    pool: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    connection: None,
) -> None:
    local, far = tmp_path / "local.csv", tmp_path / "far.csv"
    assert run_command(["predict", str(model), str(pool), "--out", str(local), "--quiet"]) == 0
    capsys.readouterr()
    arguments = ["predict", str(model), str(pool), "--out", str(far), "--quiet", "--engine", f"ray:{cluster.address}"]
    assert run_command([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["images"] == 59
    with local.open(newline="") as one, far.open(newline="") as other:
        for row, same in zip(csv.DictReader(one), csv.DictReader(other), strict=True):
            assert row["path"] == same["path"]
            assert float(row["p:dog"]) == pytest.approx(float(same["p:dog"]), abs=1e-6)
    find = ["find", str(model), str(pool), "--class", "dog", "--top", "7", "--no-page", "--quiet", "--out"]
    far_away = ["--engine", f"ray:{cluster.address}"]
    # Last digits depend on the images of a batch, and those in the cache are in none.
    monkeypatch.setenv("LOPSIDED_CACHE_GIB", "0")
    assert run_command([*find, str(tmp_path / "one.csv")]) == 0
    monkeypatch.delenv("LOPSIDED_CACHE_GIB")
    assert run_command([*find, str(tmp_path / "many.csv"), *far_away]) == 0
    assert (tmp_path / "many.csv").read_bytes() == (tmp_path / "one.csv").read_bytes()
    encoder, _ = build_encoder("test_resnet", image_size=16)
    save_file(encoder.state_dict(), tmp_path / "encoder.safetensors")
    changes = {"encoder.name": "test_resnet", "encoder.weights": str(tmp_path / "encoder.safetensors")}
    changes["data.image_size"] = 16
    (tmp_path / "recipe.toml").write_text(named_recipe("quick").override(**changes).to_toml())
    labelled = write_photos(tmp_path / "labelled", {"cat": 5, "dog": 4}, start=700)
    fill = ["cache", "fill", str(labelled), "--recipe", str(tmp_path / "recipe.toml"), "--json", "--quiet"]
    capsys.readouterr()
    for arguments, computed in ((far_away, 9), ([], 0)):
        assert run_command([*fill, *arguments]) == 0
        assert json.loads(capsys.readouterr().out)["computed"] == computed
    opened = open_model(model, "cpu")
    sides = np.eye(2, opened[1].features, dtype=np.float32)
    scorer = Scorer(*opened, known=Known(sides[:1], sides[1:]))
    images, nodes = list(find_images([pool])[1]), []
    kept = ray_map._scores

    def noted(pack: Pack, row: dict[str, Any]) -> Scores:
        nodes.append(row["node"])
        return kept(pack, row)

    monkeypatch.setattr(ray_map, "_scores", noted)

    def parts() -> Iterator[Pack]:
        return packs(images, 2)

    found, alive = [], True
    with RayMap(cluster.address, model).mapping(scorer.known) as mapper:
        for scores in mapper(parts()):
            found.append(scores)
            if alive and cluster.second.node_id in nodes:
                cluster.remove_node(cluster.second, allow_graceful=False)
                alive = False
    assert not alive, "Both nodes must have worked."
    assert_same(found, scorer.map(parts()))


def test_a_node_without_this_version_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("ray")
    monkeypatch.setattr("ray.get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "n"))
    batch = pyarrow.table({"number": [7], "paths": [[b"a.png"]]})
    row = ray_map._portable_task()(batch, "99.0", []).to_pylist()[0]
    assert row["number"] == 7
    assert row["error"].startswith(f"every node must have lopsided 99.0, got {__version__} on ")
