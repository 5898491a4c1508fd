"""Short names of encoders and weights on the hub, with local files only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import save_file

from lopsided.cli.doctor import _downloaded
from lopsided.errors import InputError
from lopsided.models.encoders import build_encoder
from lopsided.models.pretrained import check_encoder, config_of, hub_weights, preprocessing_of
from lopsided.recipe import named_recipe
from lopsided.recipe.encoder_spec import NAMES, EncoderSpec, with_full_names

COMMIT = "0123456789abcdef0123456789abcdef01234567"
ADDRESS = f"hf-hub:someone/birds@{COMMIT}"
NAME = "test_resnet"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository of weights in the hub's cache; any other is not available."""
    folder = tmp_path / "models--someone--birds" / "snapshots" / COMMIT
    folder.mkdir(parents=True)

    def download(*, repo_id: str, filename: str, revision: str = "") -> str:
        path = tmp_path / f"models--{repo_id.replace('/', '--')}" / "snapshots" / revision / filename
        if not path.is_file():
            raise LocalEntryNotFoundError("Cannot find the file in the cache, and there is no network.")
        return str(path)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    config_of.cache_clear()
    return folder


def write(path: Path, seed: int) -> dict[str, torch.Tensor]:
    encoder, _ = build_encoder(NAME, seed=seed)
    save_file(encoder.state_dict(), path)
    return encoder.state_dict()


def test_timm_has_every_model_and_tag_that_a_short_name_stands_for() -> None:
    import timm

    for named in NAMES.values():
        config = timm.get_pretrained_cfg(named.encoder)
        assert config is not None
        assert config.hf_hub_id


def test_a_short_name_brings_weights_normalisation_and_a_side() -> None:
    recipe = named_recipe("quick").override(**{"encoder.name": "dinov2-small+stages"})
    assert recipe.encoder.name == "vit_small_patch14_dinov2.lvd142m+stages"
    assert (recipe.encoder.weights, recipe.data.image_size) == ("timm", 224)
    other = {"encoder.name": "dinov2-small", "encoder.weights": "mine.safetensors", "data.image_size": 98}
    assert with_full_names(other) == {
        **other, "encoder.name": "vit_small_patch14_dinov2.lvd142m", "augment.normalisation": "weights",
    }  # fmt: skip
    assert with_full_names({"encoder.name": "resnet18"}) == {"encoder.name": "resnet18"}


def test_a_wrong_short_name_suggests_the_right_one() -> None:
    with pytest.raises(InputError, match=r"Did you mean dinov2-small "):
        check_encoder(EncoderSpec.parse("dinov2-smal"))
    with pytest.raises(InputError, match=r"Did you mean vit_small_patch14_dinov2\.lvd142m\?"):
        check_encoder(EncoderSpec.parse("dinov2-small"))


@pytest.mark.parametrize("file", ["model.safetensors", "open_clip_model.safetensors"])
def test_weights_of_an_address_are_those_of_its_commit(file: str, hub: Path) -> None:
    state = write(hub / file, seed=7)
    config: dict[str, Any] = {"mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6], "input_size": [3, 96, 96]}
    (hub / "config.json").write_text(json.dumps({"pretrained_cfg": config | {"license": "mit"}}))
    encoder, _ = build_encoder(NAME, weights=ADDRESS)
    assert all(torch.equal(value, state[key]) for key, value in encoder.state_dict().items())
    pixels = preprocessing_of(NAME, ADDRESS)
    assert (pixels.image_size, pixels.mean, pixels.std) == (96, (0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    ((part, weights),) = hub_weights(EncoderSpec.parse(NAME, ADDRESS))
    assert (part.name, weights.address, weights.licence) == (NAME, "someone/birds at 01234567", "mit")
    assert weights.megabytes == (hub / file).stat().st_size / 1e6
    assert list(_downloaded()) == [f"{ADDRESS} ({weights.megabytes:,.0f} MB)"]


def test_images_are_prepared_as_the_repository_of_openclip_says(hub: Path) -> None:
    write(hub / "open_clip_model.safetensors", seed=7)
    stated = {"mean": [0.48, 0.46, 0.41], "std": [0.27, 0.26, 0.28]}
    (hub / "open_clip_config.json").write_text(json.dumps({"model_cfg": {}, "preprocess_cfg": stated}))
    pixels = preprocessing_of(NAME, ADDRESS)
    assert (pixels.mean, pixels.std) == ((0.48, 0.46, 0.41), (0.27, 0.26, 0.28))
    assert pixels.image_size == preprocessing_of(NAME, "timm").image_size


def test_an_address_without_a_file_or_a_commit_is_one_sentence(hub: Path) -> None:
    with pytest.raises(InputError, match=r"^The weights someone/birds/model.safetensors of test_resnet are not in "):
        build_encoder(NAME, weights=ADDRESS)
    (hub / "pytorch_model.bin").write_bytes(b"a pickle")
    with pytest.raises(InputError, match=r"are not in .*, and the hub cannot be reached\. .* Set encoder\.weights"):
        build_encoder(NAME, weights=ADDRESS)
    with pytest.raises(InputError, match=r"encoder\.weights must be .*hf-hub:OWNER/NAME@COMMIT"):
        named_recipe("quick").override(**{"encoder.weights": "hf-hub:someone/birds"})


def test_an_address_with_impossible_numbers_is_one_sentence(hub: Path) -> None:
    (hub / "config.json").write_text(json.dumps({"pretrained_cfg": {"std": [0.0, 0.0, 0.0]}}))
    with pytest.raises(InputError, match=r"^hf-hub:someone/birds@.* has an invalid preprocessing: mean"):
        preprocessing_of(NAME, ADDRESS)
