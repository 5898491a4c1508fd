"""Folders for timm and the hub, loaded by timm from the disk."""

from __future__ import annotations

import ast
import json
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file

from lopsided.data.images import FileImages
from lopsided.errors import InputError, RunError
from lopsided.inference import hub
from lopsided.inference.scorer import Scorer
from lopsided.models.encoders import Ensemble, build_encoder
from lopsided.models.heads import Adapter, ClassifierHead
from lopsided.models.machine import arrange
from lopsided.models.model import AdapterCard, Model, ModelCard
from lopsided.reports.model_card import use

CLASSES = ("cat", "dog", "näive \"fox\"")  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "frozen": {"encoder": "tf_efficientnet_lite0", "encoder_weights": "embedded", "image_size": 32, "channels": 3},
    "grey": {"encoder": "resnet18", "image_size": 28, "channels": 1},
    "fixed size": {"encoder": "test_vit", "image_size": 32, "channels": 3},
}


def made(**facts: Any) -> tuple[Model, ModelCard]:
    """A model whose normalisation, statistics and classifier are those of no other."""
    seed = facts.pop("seed", 1)
    usual = {"mean": (0.4, 0.5, 0.6)[: facts["channels"]], "std": (0.2, 0.25, 0.3)[: facts["channels"]]}
    facts = {"encoder_weights": "none", **usual, **facts}
    size, channels = facts["image_size"], facts["channels"]
    encoder, features = build_encoder(
        facts["encoder"], channels=channels, image_size=size, weights=facts["encoder_weights"], seed=seed
    )
    torch.manual_seed(0)
    classifier = ClassifierHead(features, len(CLASSES))
    card = ModelCard(
        kind="image", shape=(channels, size, size), classes=CLASSES, features=features, prior=(0.5, 0.3, 0.2),
        temperature=1.5, calibrated_on=9, **facts,
    )  # fmt: skip
    arrange(encoder, torch.device("cpu"), card.shape)  # As load_model does it.
    return Model(encoder, classifier, card.mean, card.std).eval(), card


def photo(folder: Path, mode: str) -> Path:
    pixels = np.random.default_rng(0).integers(0, 256, (45, 61, 3), dtype=np.uint8)
    Image.fromarray(pixels).convert(mode).save(folder / "photo.png")
    return folder / "photo.png"


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_timm_loads_the_folder_and_gives_the_same_probabilities_of_a_file(kind: str, tmp_path: Path) -> None:
    model, card = made(**KINDS[kind])
    result = hub.export_hub(model, card, tmp_path / "hub", "# Card\n")
    assert result["difference"] <= 1e-5
    path = photo(tmp_path, "L" if card.channels == 1 else "RGB")
    loaded = timm.create_model(f"local-dir:{tmp_path / 'hub'}", pretrained=True).eval()
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(loaded))
    with torch.no_grad():
        found = loaded(transform(Image.open(path)).unsqueeze(0)).softmax(dim=1).numpy()
    np.testing.assert_allclose(found, Scorer(model, card).images(FileImages([path])), atol=1e-5)
    assert tuple(loaded.pretrained_cfg["label_names"]) == CLASSES
    assert loaded.num_classes == 3


@pytest.mark.slow
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


DISTILLED = "deit_tiny_distilled_patch16_224"  # It has two linear layers.
PARTS: dict[str, dict[str, Any]] = {
    "joined": {
        "encoder": "test_resnet+test_efficientnet", "image_size": 32, "channels": 3, "scaling": "root",
        "views": ("identity", "hflip", "rot90"),
    },
    "grey": {"encoder": "test_resnet", "image_size": 28, "channels": 1, "scaling": "cube-root"},
    "pixels": {
        "encoder": "test_resnet+pixels", "image_size": 44, "channels": 3, "scaling": "cube-root", "views": ("rot90",),
        "mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0),
    },
    "stages": {
        "encoder": "test_efficientnet+pixels+stages", "image_size": 44, "channels": 3, "scaling": "root",
        "views": ("identity", "hflip"), "mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0),
    },
    "blocks of a transformer": {"encoder": "test_vit+stages", "image_size": 32, "channels": 3},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", PARTS)
def test_the_programs_of_a_card_give_the_answers_of_a_model_that_timm_cannot_represent(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, card = made(**PARTS[kind])
    if kind == "joined":  # Each encoder has a normalisation of its own, after that of the model.
        model.encoder.mean[1], model.encoder.std[1] = torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0.9, 1.1, 1.3])
    model = Model(
        model.encoder, model.classifier, card.mean, card.std, views=card.views, scaling=card.scaling,
    ).eval()  # fmt: skip
    path = photo(tmp_path, "L" if card.channels == 1 else "RGB")
    expected = Scorer(model, card).images(FileImages([path]))[0]
    names = hub.part_names(card)
    sections = list(use(card.model_dump(mode="json"), "hub", names, timm=True))
    result = hub.export_hub(model, card, tmp_path / "hub", "\n\n".join(sections))
    assert max(result["difference"], result["onnx_difference"]) <= 1e-5
    folders = [f"encoders/{name}/{file}" for name in names for file in ("config.json", "model.safetensors")]
    assert result["files"] == sorted(["README.md", "classifier.safetensors", *folders, "lopsided.json", "model.onnx"])
    assert result["encoders"] == names == [f"{n}-{name}" for n, name in enumerate(card.spec.names, start=1)]
    monkeypatch.chdir(tmp_path)
    whole, parts = re.findall(r"```python\n(.*?)```", (tmp_path / "hub" / "README.md").read_text(), flags=re.DOTALL)
    exec(compile(whole.replace("image.png", path.name), "README.md", "exec"), {})
    label, _, shown = capsys.readouterr().out.partition(" {")
    found = ast.literal_eval("{" + shown)
    assert label == CLASSES[int(card.decision.decide(expected[None])[0])]
    assert list(found) == list(CLASSES)
    np.testing.assert_allclose(list(found.values()), expected, atol=1e-5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # A short example does not close its file.
        exec(compile(parts.replace("image.png", path.name), "README.md", "exec"), {})
    found = ast.literal_eval(capsys.readouterr().out)
    assert list(found) == list(CLASSES)
    np.testing.assert_allclose(list(found.values()), expected, atol=1e-5)


@pytest.mark.parametrize(
    ("facts", "what", "folders"),
    [
        ({"members": 2}, "an ensemble of 2 encoders", ["1-test_vit", "2-test_vit"]),
        (
            {"adapter": AdapterCard(heads=2, hidden=8, out=4, keep=True)},
            "heads between the encoder and the classifier",
            ["1-test_vit"],
        ),
        ({"head": "cosine"}, "a cosine classifier", ["1-test_vit"]),
        ({"scaling": "root"}, "scaled features", ["1-test_vit"]),
        ({"views": ("hflip",)}, "the views hflip", ["1-test_vit"]),
        ({"encoder": "test_resnet+resnet18.a1_in1k"}, "joined encoders", ["1-test_resnet", "2-resnet18"]),
        ({"encoder": DISTILLED}, f"a linear layer on the features of {DISTILLED}", [f"1-{DISTILLED}"]),
        ({}, "", []),
    ],
)
def test_a_model_that_timm_cannot_represent_becomes_a_folder_of_parts(
    facts: dict[str, Any], what: str, folders: list[str]
) -> None:
    _, card = made(**KINDS["fixed size"])
    card = card.model_copy(update=facts)
    hub.check_hub(card)
    assert hub.beyond_timm(card) == what
    assert hub.part_names(card) == folders


@pytest.mark.parametrize("facts", [{"encoder": "mlp-8"}, {"kind": "vector", "encoder": "identity", "shape": (8,)}])
def test_an_encoder_that_is_not_of_timm_is_refused_in_one_sentence(facts: dict[str, Any], tmp_path: Path) -> None:
    model, card = made(**KINDS["fixed size"])
    card = card.model_copy(update=facts)
    what = f"timm cannot represent the encoder {card.encoder}, which is not a model of timm."
    with pytest.raises(InputError) as caught:
        hub.export_hub(model, card, tmp_path / "hub", "")
    assert str(caught.value) == f"{what} Use --to onnx, which can represent every model."


def test_heads_and_members_of_an_ensemble_are_among_the_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lopsided.inference.export.make_onnx", lambda *arguments: (b"onnx", 0.0, False))
    model, card = made(encoder="test_resnet", image_size=16, channels=1)
    other, _ = made(encoder="test_resnet", image_size=16, channels=1, seed=2)
    heads = AdapterCard(heads=2, hidden=4, out=3, keep=False)
    both = Ensemble([model.encoder, other.encoder], 1)
    both.mean[:], both.std[:] = torch.tensor([[0.1], [0.2]]), torch.tensor([[0.5], [2.0]])
    adapter = Adapter(2 * card.features, **heads.model_dump())
    joined = Model(both, ClassifierHead(adapter.width, 3), card.mean, card.std, adapter=adapter).eval()
    card = card.model_copy(update={"members": 2, "adapter": heads, "features": 2 * card.features})
    result = hub.export_hub(joined, card, tmp_path / "hub", "")
    assert result["encoders"] == ["1-test_resnet", "2-test_resnet"]
    assert result["difference"] <= 1e-5
    rest = load_file(tmp_path / "hub" / "classifier.safetensors")
    assert rest.keys() == {"weight", "bias", *(f"adapter.{key}" for key in adapter.state_dict())}
    (program,) = [
        text for text in use(card.model_dump(mode="json"), "hub", result["encoders"], timm=True) if "timm.c" in text
    ]
    assert program.endswith("print(features.shape)\n```")


def test_the_encoder_of_a_part_that_timm_reads_otherwise_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lopsided.inference.export.make_onnx", lambda *arguments: (b"onnx", 0.0, False))
    model, card = made(**PARTS["grey"])
    kept = hub.config_of
    monkeypatch.setattr(hub, "config_of", lambda *a, mean=(), **b: kept(*a, mean=[value + 0.1 for value in mean], **b))
    with pytest.raises(RunError, match=r"^timm must give the features of the model within 0\.0001, got a difference "):
        hub.export_hub(model, card, tmp_path / "hub", "")
    assert not list(tmp_path.iterdir())


def test_a_folder_that_timm_reads_otherwise_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, card = made(**KINDS["fixed size"])
    kept = hub._state

    def changed(*arguments: Any) -> dict[str, torch.Tensor]:
        return {key: value * 2 if key == "bias" else value for key, value in kept(*arguments).items()}

    monkeypatch.setattr(hub, "_state", changed)
    with pytest.raises(RunError, match=r"^timm must give the logits of the model within 0\.0001, got a difference of "):
        hub.export_hub(model, card, tmp_path / "hub", "")
    assert not list(tmp_path.iterdir())


def test_a_file_of_weights_is_named_without_its_folder() -> None:
    _, card = made(**KINDS["fixed size"])
    own = hub._own(card.model_copy(update={"encoder_weights": "/home/me/secret/w.safetensors"}), b"")
    assert own["encoder_weights"] == "w.safetensors"
    joined = {"encoder": "resnet18+resnet34", "encoder_weights": "timm+/home/me/secret/w.safetensors"}
    assert hub._own(card.model_copy(update=joined), b"")["encoder_weights"] == "timm+w.safetensors"
    assert hub.base_model(card) is None
    assert hub.base_model(card.model_copy(update={"encoder": "resnet18", "encoder_weights": "timm"})) == (
        timm.get_pretrained_cfg("resnet18").hf_hub_id
    )
