from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from lopsided.data.images import FileImages
from lopsided.errors import MissingDependencyError, RunError
from lopsided.inference import export
from lopsided.inference.probabilities import predict
from lopsided.runs.run import open_model
from tiny import CLASSES, SIZE, write_model, write_photos

pytestmark = pytest.mark.slow

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple:
    return open_model(write_model(tmp_path_factory.mktemp("model")), "cpu")


@pytest.fixture(scope="module")
def exported(model: tuple, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("export") / "model.onnx"
    result = export.export_onnx(*model, out)
    assert result["checked"] == [1, 17]
    assert result["difference"] <= 1e-4
    return out


def test_another_program_gets_the_same_probabilities_from_pixels_between_0_and_1(
    model: tuple, exported: Path, tmp_path: Path
) -> None:
    paths = sorted(write_photos(tmp_path, {"cat": 6, "dog": 5}).rglob("*.png"))
    images = FileImages(paths)
    pixels = images.load(np.arange(len(paths)), SIZE, 3).numpy().astype(np.float32) / 255
    session = onnxruntime.InferenceSession(str(exported), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"images": pixels})
    np.testing.assert_allclose(found, predict(*model, images), atol=1e-5)
    (one,) = session.run(None, {"images": pixels[:1]})
    np.testing.assert_allclose(one, found[:1], atol=1e-6)


def test_the_file_is_one_valid_model_that_says_what_it_takes(exported: Path) -> None:
    assert [path.name for path in exported.parent.iterdir()] == ["model.onnx"]
    proto = onnx.load(exported)
    onnx.checker.check_model(proto, full_check=True)
    facts = {item.key: item.value for item in proto.metadata_props}
    assert json.loads(facts["classes"]) == list(CLASSES)
    assert json.loads(facts["shape"]) == [3, SIZE, SIZE]
    assert facts["range"] == "[0, 1]"
    assert proto.producer_name == "lopsided"
    (given,) = proto.graph.input
    assert given.type.tensor_type.shape.dim[0].dim_param
    assert str(Path(__file__).parents[2]).encode() not in exported.read_bytes()


def test_answers_that_differ_are_no_success_and_leave_no_file(
    model: tuple, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    network, card = model
    make = export._to_onnx

    def other(network: torch.nn.Module, card: object) -> bytes:
        with torch.no_grad():
            bias = network[0].classifier.bias
            bias += torch.tensor([0.01, 0.0])
            content = make(network, card)
            bias -= torch.tensor([0.01, 0.0])
        return content

    monkeypatch.setattr(export, "_to_onnx", other)
    with pytest.raises(RunError, match=r"^onnxruntime must agree with torch within 0\.0001, got a difference of 0\.00"):
        export.export_onnx(network, card, tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())


def test_a_missing_package_is_named_with_the_extra_that_brings_it(
    model: tuple, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "onnxscript" else find(name))
    must = (
        r"^export --to onnx needs onnxscript\. Not installed: onnxscript\. "
        r"Run pip install 'lopsided\[onnx\]'\.$"
    )
    with pytest.raises(MissingDependencyError, match=must):
        export.export_onnx(*model, tmp_path / "model.onnx")


def test_a_convolutional_encoder_is_exported_without_a_word(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = open_model(write_model(tmp_path, encoder="resnet10t", image_size=32), "cpu")
    assert export.export_onnx(*model, tmp_path / "model.onnx")["difference"] <= 1e-4
    assert capfd.readouterr() == ("", "")


def test_what_cannot_be_written_as_onnx_is_one_sentence_and_no_file(
    model: tuple, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Program:
        @property
        def model_proto(self) -> None:
            raise TypeError("expected an int, got a boolean\nand a page about it")

    monkeypatch.setattr(torch.onnx, "export", lambda *_, **__: Program())
    must = r"^torch cannot export the encoder \S+ \(expected an int, got a boolean\)\.$"
    with pytest.raises(RunError, match=must):
        export.export_onnx(*model, tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())
