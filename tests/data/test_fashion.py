from __future__ import annotations

import gzip
import hashlib
import importlib.util
import struct
from importlib.resources import files
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lopsided.data.images import ArrayImages
from lopsided.data.sources import fashion, open_source
from lopsided.data.sources.fashion import CLASSES, DEBIAN, from_sheet, holds_fashion, list_fashion, read_idx, to_sheet
from lopsided.errors import DataError

REPOSITORY = Path(__file__).parents[2]


def idx(values: np.ndarray) -> bytes:
    return bytes([0, 0, 8, values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape) + values.tobytes()


def write_fashion(folder: Path, *, packed: bool = True) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """A Fashion-MNIST of 20 and 10 images."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(0)
    written = {}
    for prefix, n in (("train", 20), ("t10k", 10)):
        x = generator.integers(0, 256, (n, 28, 28), dtype=np.uint8)
        y = (np.arange(n) % 10).astype(np.uint8)
        for kind, values in (("images-idx3", x), ("labels-idx1", y)):
            content = idx(values)
            path = folder / f"{prefix}-{kind}-ubyte{'.gz' if packed else ''}"
            path.write_bytes(gzip.compress(content) if packed else content)
        written[prefix] = (x, y)
    return written


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine that has no Fashion-MNIST; its cache is returned."""
    monkeypatch.delenv("LOPSIDED_DATA", raising=False)
    monkeypatch.setattr(fashion, "DEBIAN", tmp_path / "debian")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "lopsided" / "fashion-mnist"


# The embedded tops


def test_the_embedded_tops_are_two_thousand_of_each() -> None:
    source = open_source("fashion-mnist-tops")
    assert source.counts() == {"T-shirt/top": 2000, "Shirt": 2000}
    assert source.images.channels == 1
    assert source.images.load(np.array([0, 3999]), None, 1).shape == (2, 1, 28, 28)
    assert len(set(source.names)) == 4000
    assert source.splits is None


def test_the_embedded_tops_can_be_asked_for_in_any_order_and_by_label() -> None:
    assert open_source("fashion-mnist-tops", classes=["shirt", "t-shirt"]).classes == ("Shirt", "T-shirt/top")
    assert open_source("fashion-mnist-tops", classes=["0", "6"]).classes == ("T-shirt/top", "Shirt")


def test_tops_of_a_damaged_installation_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fashion, "TOPS_SHA256", "0" * 64)
    with pytest.raises(
        DataError, match=r"^The embedded images do not match their checksum\. Install the package again\.$"
    ):
        open_source("fashion-mnist-tops")


def test_the_licence_and_the_digest_lie_beside_the_tops() -> None:
    note = files("lopsided.data").joinpath("assets", "LICENSE-fashion-mnist.txt").read_text()
    assert "Copyright (c) 2017 Zalando SE" in note
    assert fashion.TOPS_SHA256 in note


def make_tops() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_tops", REPOSITORY / "scripts" / "make_tops.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(not holds_fashion(DEBIAN), reason="Debian's dataset-fashion-mnist is not installed")
def test_the_script_makes_the_embedded_tops_again() -> None:
    tops = make_tops().choose_tops(DEBIAN)
    embedded = open_source("fashion-mnist-tops").images
    assert isinstance(embedded, ArrayImages)
    assert np.array_equal(tops, embedded.pixels[:, 0])
    assert hashlib.sha256(tops.tobytes()).hexdigest() == fashion.TOPS_SHA256


@settings(max_examples=20, deadline=None)
@given(rows=st.integers(1, 4), seed=st.integers(0, 99))
def test_a_sheet_and_its_images_turn_into_each_other(rows: int, seed: int) -> None:
    pixels = np.random.default_rng(seed).integers(0, 256, (80 * rows, 28, 28), dtype=np.uint8)
    sheet = to_sheet(pixels)
    assert np.array_equal(sheet[:28, 28:56], pixels[1])
    assert np.array_equal(from_sheet(sheet), pixels)


# All of it


@pytest.mark.parametrize("packed", [True, False])
def test_fashion_mnist_is_read_with_its_splits(tmp_path: Path, packed: bool) -> None:
    written = write_fashion(tmp_path, packed=packed)
    source = open_source(tmp_path)
    assert source.name == "fashion-mnist"
    assert source.classes == CLASSES
    assert source.splits is not None
    train = np.flatnonzero(source.splits == "train")
    test = np.flatnonzero(source.splits == "test")
    assert np.array_equal(source.images.load(train, None, 1)[:, 0], written["train"][0])
    assert np.array_equal(source.images.load(test, None, 1)[:, 0], written["t10k"][0])
    assert source.labels[test].tolist() == written["t10k"][1].tolist()


@pytest.mark.parametrize("below", ["", "fashion-mnist", "FashionMNIST/raw"])
def test_fashion_mnist_is_found_through_the_variable(
    tmp_path: Path, nowhere: Path, monkeypatch: pytest.MonkeyPatch, below: str
) -> None:
    write_fashion(tmp_path / "data" / below)
    monkeypatch.setenv("LOPSIDED_DATA", str(tmp_path / "data"))
    assert len(open_source("fashion-mnist")) == 30


def test_fashion_mnist_is_found_in_debians_folder_and_in_the_cache(tmp_path: Path, nowhere: Path) -> None:
    write_fashion(nowhere)
    assert list_fashion().where == str(nowhere)
    write_fashion(tmp_path / "debian")
    assert list_fashion().where == str(tmp_path / "debian")


@pytest.mark.parametrize("error", [RuntimeError("Error downloading"), OSError("Name or service not known")])
def test_offline_one_sentence_says_where_to_put_it(
    nowhere: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    torchvision = pytest.importorskip("torchvision")

    def refuse(*arguments: object, **options: object) -> None:
        raise error

    monkeypatch.setattr(torchvision.datasets, "FashionMNIST", refuse)
    with pytest.raises(DataError) as caught:
        open_source("fashion-mnist")
    assert str(caught.value) == (
        f"fashion-mnist is not on this machine and cannot be downloaded ({error}). "
        f"Put the four IDX files (train-images-idx3-ubyte.gz and so on) in {nowhere} or below $LOPSIDED_DATA, "
        "or install Debian's dataset-fashion-mnist."
    )
    assert list(nowhere.iterdir()) == []


def test_a_download_ends_in_the_cache(nowhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torchvision = pytest.importorskip("torchvision")
    monkeypatch.setattr(
        torchvision.datasets, "FashionMNIST", lambda root, download: write_fashion(Path(root) / "FashionMNIST" / "raw")
    )
    assert len(open_source("fashion-mnist")) == 30
    assert len(list(nowhere.iterdir())) == 4
    monkeypatch.delattr(torchvision.datasets, "FashionMNIST")
    assert len(open_source("fashion-mnist")) == 30


# IDX files


def test_an_idx_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    values = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
    (tmp_path / "a").write_bytes(idx(values))
    assert np.array_equal(read_idx(tmp_path / "a"), values)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not an IDX file: an IDX file starts with 00 00 08 and its rank"),
        (b"PNG?1234", "is not an IDX file: an IDX file starts with 00 00 08 and its rank"),
        (bytes([0, 0, 8, 1, 0, 0]), "has fewer bytes than its header declares"),
        (idx(np.zeros(9, dtype=np.uint8))[:-1], "has fewer bytes than its header declares"),
        (idx(np.zeros(9, dtype=np.uint8)) + b"x", "has more bytes than its header declares"),
        (
            bytes([0, 0, 8, 2]) + b"\xff" * 8 + b"x",
            r"an IDX file must hold at most 1,073,741,824 bytes, got 18,446,744,065,119,617,025 in ",
        ),
    ],
)
def test_an_idx_file_that_lies_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "labels").write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        read_idx(tmp_path / "labels")
    assert str(tmp_path / "labels") in str(caught.value)


def test_a_truncated_packed_file_is_named(tmp_path: Path) -> None:
    write_fashion(tmp_path)
    path = tmp_path / "train-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(DataError, match=r"Cannot read the IDX file .*train-images-idx3-ubyte\.gz \(.+\)\. Download it"):
        open_source(tmp_path)


def test_images_and_labels_must_agree_in_number(tmp_path: Path) -> None:
    write_fashion(tmp_path, packed=False)
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx(np.zeros(3, dtype=np.uint8)))
    with pytest.raises(
        DataError, match=r"images must be 28 x 28, each with one label below 10, got \(20, 28, 28\) and \(3,\)"
    ):
        open_source(tmp_path)


@pytest.mark.skipif(not holds_fashion(DEBIAN), reason="Debian's dataset-fashion-mnist is not installed")
def test_the_real_fashion_mnist_has_seven_thousand_of_each() -> None:
    source = open_source(DEBIAN)
    assert source.counts() == dict.fromkeys(CLASSES, 7000)
    assert source.splits is not None
    assert (source.splits == "train").sum() == 60000
