"""Sources behind an address: in memory, in files, and laid out as on the hub."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from pathlib import Path

import fsspec
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import _registry
from PIL import Image

from lopsided.data.decoding import UnreadableImageError
from lopsided.data.images import FileImages, Vectors
from lopsided.data.prepare import Sources
from lopsided.data.sources import Source, name_of, open_source
from lopsided.errors import DataError, MissingDependencyError
from lopsided.inference.pool import find_images
from lopsided.recipe import named_recipe
from lopsided.runs.run import settle


def png(value: int) -> bytes:
    content = io.BytesIO()
    Image.new("RGB", (8, 8), (value, 0, 0)).save(content, "PNG")
    return content.getvalue()


@pytest.fixture
def memory() -> Iterator[fsspec.AbstractFileSystem]:
    system = fsspec.filesystem("memory")
    yield system
    system.store.clear()
    system.pseudo_dirs[:] = [""]


def fill(system: fsspec.AbstractFileSystem, folder: str, counts: dict[str, int]) -> None:
    for place, (name, number) in enumerate(counts.items()):
        for i in range(number):
            system.pipe_file(f"{folder}/{name}/{i}.png", png(10 * i + place))


def test_class_folders_behind_an_address_are_those_of_this_machine(
    memory: fsspec.AbstractFileSystem, tmp_path: Path
) -> None:
    fill(memory, "/bucket/photos", {"cat": 3, "dog": 2})
    fill(fsspec.filesystem("file", auto_mkdir=True), str(tmp_path / "photos"), {"cat": 3, "dog": 2})
    memory.pipe_file("/bucket/photos/notes.txt", b"x")
    memory.pipe_file("/bucket/photos/.hidden/x.png", png(1))
    here = open_source(tmp_path / "photos")
    for address in ("memory://bucket/photos", "memory://bucket/photos/", f"file://{tmp_path}/photos"):
        source = open_source(address)
        assert source.name == name_of(address) == "photos"
        assert (source.names, source.classes, source.counts()) == (here.names, here.classes, here.counts())
        rows = np.arange(5)
        assert source.images.digest(rows) == here.images.digest(rows)
        assert source.images.load(rows, None, 3).equal(here.images.load(rows, None, 3))
        assert source.verify().images.channels == 3


def test_splits_groups_and_patterns_of_an_address(memory: fsspec.AbstractFileSystem) -> None:
    fill(memory, "/p", {"train/a/g1": 2, "train/b/g2": 1, "Test/a/g1": 1, "Test/b/g3": 1})
    source = open_source("memory://p", group="parent")
    assert source.splits is not None
    assert source.groups is not None
    assert source.splits.tolist() == ["test", "test", "train", "train", "train"]
    assert source.groups.tolist() == ["g1", "g3", "g1", "g1", "g2"]
    some = open_source("memory://p", group_from="{group}/*.png", exclude=["Test/*"])
    assert some.groups is not None
    assert some.groups.tolist() == ["g1", "g1", "g2"]
    assert some.left_out == 2


def test_a_table_and_vectors_behind_an_address(memory: fsspec.AbstractFileSystem) -> None:
    fill(memory, "/p/photos", {"a": 2, "b": 1})
    memory.pipe_file("/p/t.csv", b"path,label,patient\nphotos/a/0.png,x,1\nphotos/a/1.png,y,1\nphotos/b/0.png,y,2\n")
    source = open_source("memory://p/t.csv", group="patient")
    assert (source.name, source.counts()) == ("t", {"x": 1, "y": 2})
    assert source.images.load(np.arange(3), None, 3)[:, 0, 0, 0].tolist() == [0, 10, 1]
    memory.pipe_file("/p/bad.csv", b"path,label\n../photos/a/0.png,x\n")
    with pytest.raises(DataError, match="paths must stay below"):
        open_source("memory://p/bad.csv")
    content = io.BytesIO()
    np.savez(content, x=np.eye(4), y=["a", "a", "b", "b"])
    memory.pipe_file("/p/v.npz", content.getvalue())
    assert isinstance(open_source("memory://p/v.npz").images, Vectors)
    assert settle(named_recipe("quick"), "memory://p/v.npz").encoder.name == "identity"


class Hub(MemoryFileSystem):
    """Files in memory under the addresses of the Hugging Face hub."""

    protocol = "hf"

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return "/" + path.removeprefix("hf://").strip("/")


def shard(labels: list[int], start: int, **columns: list[str]) -> bytes:
    """A Parquet file as the hub has it: images as bytes, labels as numbers whose names are in the metadata."""
    images = [{"bytes": png(start + i), "path": f"{i}.png"} for i in range(len(labels))]
    features = {"label": {"names": ["cat", "dog"], "_type": "ClassLabel"}}
    table = pyarrow.table({"image": images, "label": labels, **columns})
    table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    content = io.BytesIO()
    pyarrow.parquet.write_table(table, content, row_group_size=2)
    return content.getvalue()


def test_a_data_set_of_the_hub_is_read_by_row_groups(
    memory: fsspec.AbstractFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(_registry, "hf", Hub)
    root = "/datasets/owner/pets/data"
    memory.pipe_file(f"{root}/train-00000-of-00002.parquet", shard([0, 1, 0], 0, patient=["p", "p", "q"]))
    memory.pipe_file(f"{root}/train-00001-of-00002.parquet", shard([1, 0], 50, patient=["q", "r"]))
    memory.pipe_file(f"{root}/test-00000-of-00001.parquet", shard([1, -1], 90, patient=["s", "s"]))
    with pytest.raises(DataError, match=r"every image must have a label, got 1 of 7 without .*the first test/000001"):
        open_source("hf://datasets/owner/pets")
    source = open_source("hf://datasets/owner/pets", group="patient", exclude=["test/000001"])
    assert (source.name, source.classes, source.counts()) == ("pets", ("cat", "dog"), {"cat": 3, "dog": 3})
    assert source.splits is not None
    assert source.splits.tolist() == ["test", "train", "train", "train", "train", "train"]
    assert source.groups is not None
    assert source.groups.tolist() == ["s", "p", "p", "q", "q", "r"]
    assert source.verify().images.load(np.arange(6), None, 3)[:, 0, 0, 0].tolist() == [90, 0, 1, 2, 50, 51]


def test_a_parquet_table_with_images_in_its_cells_is_a_source_on_this_machine(tmp_path: Path) -> None:
    (tmp_path / "pets.parquet").write_bytes(shard([0, 1, 1], 0))
    source = open_source(tmp_path / "pets.parquet").verify()
    assert source.counts() == {"cat": 1, "dog": 2}
    assert source.images.load(np.arange(3), 4, 1).shape == (3, 1, 4, 4)


def test_a_run_reads_each_listing_once_and_refuses_an_image_that_changes(memory: fsspec.AbstractFileSystem) -> None:
    fill(memory, "/p", {"a": 2, "b": 2})
    recipe = settle(named_recipe("quick"), "memory://p")
    assert recipe.data.source == "memory://p"
    source, _ = Sources().open(recipe)
    memory.pipe_file("/p/a/1.png", png(99))
    with pytest.raises(UnreadableImageError, match="its content has changed"):
        source.images.load(np.arange(4), None, 3)


def test_reports_fetch_nothing(memory: fsspec.AbstractFileSystem) -> None:
    fill(memory, "/p", {"a": 1, "b": 1})
    with pytest.raises(DataError, match="memory://p is not on this machine"):
        Source.open(settle(named_recipe("quick"), "memory://p").data, download=False)


def test_a_pool_may_be_an_address(memory: fsspec.AbstractFileSystem) -> None:
    fill(memory, "/p", {"a": 2, "b": 1})
    number, paths = find_images(["memory://p", "memory://p/a/0.png"])
    found = list(paths)
    assert number == len(found) == 4
    images = FileImages(found, 3)
    assert images.load(np.arange(4), None, 3)[:, 0, 0, 0].tolist() == [0, 10, 1, 0]


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("memory://nothing", r"memory://nothing does not exist\."),
        ("memory://p/a/0.png", "an address must be that of a folder, a table or vectors"),
        ("memory://p/a", "images must be in one sub-folder per class, got 2 directly in memory://p/a, the first 0.png"),
        ("unheard://p", "Cannot open unheard://p "),
    ],
)
def test_what_an_address_does_not_hold_is_one_sentence(
    memory: fsspec.AbstractFileSystem, address: str, message: str
) -> None:
    fill(memory, "/p", {"a": 2, "b": 1})
    with pytest.raises(DataError, match=message):
        open_source(address)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fsspec.core, "url_to_fs", lambda address: (_ for _ in ()).throw(ImportError("no")))
    for kind, package in (("s3", "s3fs"), ("gs", "gcsfs")):
        words = f"needs {package}, which is not installed. Run pip install 'lopsided[{kind}]'."
        with pytest.raises(MissingDependencyError, match=re.escape(words)):
            open_source(f"{kind}://b/p")
