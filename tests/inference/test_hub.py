"""Folders for timm and the hub, loaded by timm from the disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image

from lopsided.data.images import FileImages
from lopsided.errors import InputError, RunError
from lopsided.inference import hub
from lopsided.inference.probabilities import predict
from lopsided.models.encoders import build_encoder
from lopsided.models.heads import ClassifierHead
from lopsided.models.machine import arrange
from lopsided.models.model import AdapterCard, Model, ModelCard

CLASSES = ("cat", "dog", "näive \"fox\"")  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "frozen": {"encoder": "tf_efficientnet_lite0", "encoder_weights": "embedded", "image_size": 32, "channels": 3},
    "grey": {"encoder": "resnet18", "image_size": 28, "channels": 1},
    "fixed size": {"encoder": "test_vit", "image_size": 32, "channels": 3},
}


def made(**facts: Any) -> tuple[Model, ModelCard]:
    """A model whose normalisation, statistics and classifier are those of no other."""
    facts = {"encoder_weights": "none", **facts}
    size, channels = facts["image_size"], facts["channels"]
    encoder, features = build_encoder(
        facts["encoder"], channels=channels, image_size=size, weights=facts["encoder_weights"], seed=1
    )
    torch.manual_seed(0)
    classifier = ClassifierHead(features, len(CLASSES))
    card = ModelCard(
        kind="image", shape=(channels, size, size), mean=(0.4, 0.5, 0.6)[:channels], std=(0.2, 0.25, 0.3)[:channels],
        classes=CLASSES, features=features, prior=(0.5, 0.3, 0.2), temperature=1.5, calibrated_on=9, **facts,
    )  # fmt: skip
    arrange(encoder, torch.device("cpu"), card.shape)  # As load_model does it.
    return Model(encoder, classifier, card.mean, card.std).eval(), card


def photo(folder: Path, mode: str) -> Path:
    pixels = np.random.default_rng(0).integers(0, 256, (45, 61, 3), dtype=np.uint8)
    Image.fromarray(pixels).convert(mode).save(folder / "photo.png")
    return folder / "photo.png"


@pytest.mark.parametrize("kind", KINDS)
def test_timm_loads_the_folder_and_gives_the_same_probabilities_of_a_file(kind: str, tmp_path: Path) -> None:
    model, card = made(**KINDS[kind])
    result = hub.export_hub(model, card, tmp_path / "hub", "# Card\n")
    assert result["difference"] <= 1e-5
    path = photo(tmp_path, "L" if card.channels == 1 else "RGB")
    if not hasattr(timm.models._hub, "load_model_config_from_path"):
        pytest.skip("timm is older than 1.0.16")
    loaded = timm.create_model(f"local-dir:{tmp_path / 'hub'}", pretrained=True).eval()
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(loaded))
    with torch.no_grad():
        found = loaded(transform(Image.open(path)).unsqueeze(0)).softmax(dim=1).numpy()
    np.testing.assert_allclose(found, predict(model, card, FileImages([path])), atol=1e-5)
    assert tuple(loaded.pretrained_cfg["label_names"]) == CLASSES
    assert loaded.num_classes == 3


def test_the_folder_holds_the_rule_the_licence_of_the_weights_and_no_code(tmp_path: Path) -> None:
    model, card = made(**KINDS["frozen"])
    (tmp_path / "hub").mkdir()  # An empty folder may be there.
    assert hub.export_hub(model, card, tmp_path / "hub", "# Card\n")["files"] == [
        "LICENSE-efficientnet-lite.txt", "README.md", "config.json", "lopsided.json", "model.safetensors",
    ]  # fmt: skip
    own = json.loads((tmp_path / "hub" / "lopsided.json").read_bytes())
    assert ModelCard.model_validate(own).decision == card.decision
    assert (own["prior"], own["classes"], own["temperature"]) == ([0.5, 0.3, 0.2], list(CLASSES), 1.5)
    assert (tmp_path / "hub" / "README.md").read_text() == "# Card\n"
    assert "Apache License" in (tmp_path / "hub" / "LICENSE-efficientnet-lite.txt").read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["hub"]
    with pytest.raises(InputError, match=r"^--out must be a new or an empty folder, got .*may hold your changes\.$"):
        hub.export_hub(model, card, tmp_path / "hub", "")
    with pytest.raises(InputError, match=r"^--out must be in an existing folder, got "):
        hub.export_hub(model, card, tmp_path / "no" / "hub", "")


@pytest.mark.parametrize(
    ("facts", "what"),
    [
        ({"members": 5}, "an ensemble of 5 encoders"),
        ({"adapter": AdapterCard(heads=2, hidden=8, out=4, keep=True)}, "heads between the encoder and the classifier"),
        ({"head": "cosine"}, "a cosine classifier"),
        ({"encoder": "mlp-8"}, "the encoder mlp-8, which is not a model of timm"),
        ({"views": ("hflip",)}, "the views hflip"),
    ],
)
def test_what_timm_cannot_represent_is_refused_in_one_sentence(facts: dict[str, Any], what: str) -> None:
    card = ModelCard(
        kind="image", encoder="test_vit", channels=3, image_size=8, shape=(3, 8, 8), mean=(0, 0, 0), std=(1, 1, 1),
        classes=CLASSES, features=4,
    ).model_copy(update=facts)  # fmt: skip
    with pytest.raises(InputError) as caught:
        hub.check_hub(card)
    assert str(caught.value).startswith(
        f"timm cannot represent {what}. Use --to onnx, which can represent every model."
    )


@pytest.mark.parametrize(
    ("facts", "flags"),
    [
        ({"scaling": "root"}, "--set encoder.scaling=none"),
        ({"scaling": "root", "views": ("identity", "hflip")}, "--views none --set encoder.scaling=none"),
        ({"views": ("identity", "hflip")}, "--views none --set encoder.scaling=none"),
        ({"encoder": "a+b", "scaling": "root"}, "--recipe default --set encoder.scaling=none"),
    ],
)
def test_a_refusal_names_all_flags_that_give_a_model_for_timm(facts: dict[str, Any], flags: str) -> None:
    _, card = made(**KINDS["fixed size"])
    with pytest.raises(InputError) as caught:
        hub.check_hub(card.model_copy(update=facts))
    assert str(caught.value).endswith(f"every model. Or train with {flags}.")


def test_a_model_of_timm_without_one_linear_layer_is_refused(tmp_path: Path) -> None:
    model, card = made(**KINDS["fixed size"])
    odd = card.model_copy(update={"encoder": "test_vit2"})
    with pytest.raises(
        InputError, match=r"^timm's test_vit2 has no single linear layer on its features\. Use --to onnx"
    ):
        hub.export_hub(model, odd, tmp_path / "hub", "")
    assert not list(tmp_path.iterdir())


def test_a_folder_that_timm_reads_otherwise_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, card = made(**KINDS["fixed size"])
    kept = hub._state

    def changed(*arguments: Any) -> dict[str, torch.Tensor]:
        return {key: value * 2 if key == "head.bias" else value for key, value in kept(*arguments).items()}

    monkeypatch.setattr(hub, "_state", changed)
    with pytest.raises(RunError, match=r"^timm must give the logits of the model within 0\.0001, got a difference of "):
        hub.export_hub(model, card, tmp_path / "hub", "")
    assert not list(tmp_path.iterdir())


def test_a_file_of_weights_is_named_without_its_folder() -> None:
    _, card = made(**KINDS["fixed size"])
    own = hub._own(card.model_copy(update={"encoder_weights": "/home/me/secret/w.safetensors"}), b"")
    assert own["encoder_weights"] == "w.safetensors"
    assert hub.base_model(card) is None
    assert hub.base_model(card.model_copy(update={"encoder": "resnet18", "encoder_weights": "timm"})) == (
        timm.get_pretrained_cfg("resnet18").hf_hub_id
    )
