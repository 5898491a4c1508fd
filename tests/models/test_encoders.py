from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import save_file

from lopsided.errors import InputError
from lopsided.models.encoders import build_encoder

SMALL = "test_resnet"


@pytest.fixture(scope="module")
def full() -> dict[str, torch.Tensor]:
    """The weights of a small network with a classifier and three channels, as in a published file."""
    model = timm.create_model(SMALL, pretrained=False, num_classes=10)
    return {key: value.clone() for key, value in model.state_dict().items()}


def test_any_timm_model_is_built_by_name_for_the_channels_of_the_source() -> None:
    for name, features in ((SMALL, 96), ("lcnet_035", 1280)):
        encoder, num_features = build_encoder(name, channels=1, image_size=32)
        assert num_features == features
        assert encoder(torch.rand(2, 1, 32, 32)).shape == (2, features)
        assert encoder.training
    assert build_encoder("lcnet_035", channels=3)[1] == 1280


def test_a_model_of_fixed_input_size_is_built_for_the_size_of_the_images() -> None:
    encoder, num_features = build_encoder("test_vit", channels=3, image_size=(32, 48))
    assert encoder(torch.rand(2, 3, 32, 48)).shape == (2, num_features)


def test_initial_weights_follow_from_the_seed_and_leave_the_global_state_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    one, other, third = (build_encoder(SMALL, channels=1, seed=seed)[0].state_dict() for seed in (1, 1, 2))
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(one[key], other[key]) for key in one)
    assert any(not torch.equal(one[key], third[key]) for key in one)


def test_an_mlp_takes_vectors_and_flattened_images() -> None:
    encoder, num_features = build_encoder("mlp", in_features=7)
    assert [tuple(p.shape) for p in encoder.parameters() if p.ndim == 2] == [(128, 7), (128, 128)]
    assert num_features == 128
    assert build_encoder("mlp" + "-2" * 64, in_features=7)[1] == 2
    encoder, num_features = build_encoder("mlp-32-5", channels=1, image_size=4)
    assert encoder(torch.rand(3, 1, 4, 4)).shape == (3, 5)
    assert num_features == 5


@pytest.mark.parametrize(
    ("name", "options", "text"),
    [
        ("resnet81", {}, r"encoder\.name must be a timm model or \"mlp\", got 'resnet81'\. Did you mean resnet\d+"),
        ("hf-hub:timm/resnet18", {}, r"must be a timm model or \"mlp\", got 'hf-hub:timm/resnet18'"),
        ("resnet18.nonsense", {}, r"must be one of timm's tags for resnet18, got 'nonsense'\. Leave this part out\."),
        ("mlp", {}, r"The encoder mlp needs images of a fixed size\. Set image_size\."),
        ("mlp-0", {"in_features": 3}, r"the layers of an mlp must have a width >= 1, got mlp-0\."),
        ("mlp", {"in_features": 3, "weights": "timm"}, r'encoder\.weights must be "none" or a file for an mlp'),
        (
            "convnext_atto",
            {"image_size": 8},
            r"The encoder convnext_atto cannot turn an image of 8 x 8 into one feature vector: ",
        ),
    ],
)
def test_an_encoder_that_cannot_be_built_is_one_sentence(name: str, options: dict[str, object], text: str) -> None:
    with pytest.raises(InputError, match=text) as caught:
        build_encoder(name, **options)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_a_file_of_weights_is_loaded_without_its_classifier(tmp_path: Path, full: dict[str, torch.Tensor]) -> None:
    save_file(full, tmp_path / "w.safetensors")
    encoder, _ = build_encoder(SMALL, channels=3, image_size=32, weights=tmp_path / "w.safetensors")
    for key, value in encoder.state_dict().items():
        assert torch.equal(value, full[key]), key


def test_weights_in_half_precision_without_batch_counts_are_loaded_as_float32(
    tmp_path: Path, full: dict[str, torch.Tensor]
) -> None:
    halves = {key: value.half() for key, value in full.items() if not key.endswith("num_batches_tracked")}
    save_file(halves, tmp_path / "w.safetensors")
    encoder, _ = build_encoder(SMALL, channels=3, weights=str(tmp_path / "w.safetensors"))
    for key, value in encoder.named_parameters():
        assert value.dtype == torch.float32
        assert torch.equal(value, halves[key].float()), key


def test_a_first_convolution_of_three_channels_becomes_one_of_one_by_summing(
    tmp_path: Path, full: dict[str, torch.Tensor]
) -> None:
    save_file(full, tmp_path / "w.safetensors")
    grey, _ = build_encoder(SMALL, channels=1, weights=tmp_path / "w.safetensors")
    colour, _ = build_encoder(SMALL, channels=3, weights=tmp_path / "w.safetensors")
    x = torch.rand(2, 1, 32, 32)
    torch.testing.assert_close(grey.eval()(x), colour.eval()(x.repeat(1, 3, 1, 1)), rtol=1e-4, atol=1e-5)


def test_position_embeddings_of_another_size_are_resampled_as_timm_does(tmp_path: Path) -> None:
    model = timm.create_model("test_vit", pretrained=False, num_classes=10, img_size=64)
    save_file(model.state_dict(), tmp_path / "w.safetensors")
    encoder, _ = build_encoder("test_vit", channels=3, image_size=32, weights=tmp_path / "w.safetensors")
    own = encoder.state_dict()
    assert torch.equal(own["patch_embed.proj.weight"], model.state_dict()["patch_embed.proj.weight"])
    assert own["pos_embed"].shape != model.state_dict()["pos_embed"].shape


def test_weights_that_do_not_fit_are_one_sentence(tmp_path: Path, full: dict[str, torch.Tensor]) -> None:
    path = tmp_path / "w.safetensors"
    names = [key for key in full if key.startswith("layer4")]
    cases = [
        ({k: v for k, v in full.items() if k not in names}, rf"it has no {names[0]} and \d+ more\. Use a file"),
        ({**full, "extra.weight": torch.zeros(1)}, r"it also holds extra\.weight\. Use a file for this"),
        ({**full, names[0]: torch.zeros(1, 2)}, rf"{names[0]} has shape \(1, 2\), but must have \(.*\)\. Use a"),
    ]
    for content, text in cases:
        save_file(content, path)
        with pytest.raises(InputError, match=rf"w\.safetensors does not fit {SMALL}: {text}"):
            build_encoder(SMALL, channels=3, weights=path)


def test_a_file_that_is_no_safetensors_file_is_refused_unopened_by_anything_else(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    torch.save({"x": torch.zeros(1)}, path)
    with pytest.raises(
        InputError, match=r"encoder\.weights must be a readable safetensors file, got .*w\.safetensors \("
    ):
        build_encoder(SMALL, channels=3, weights=path)
    with pytest.raises(InputError, match=r"got .*absent\.safetensors \(No such file or directory"):
        build_encoder(SMALL, channels=3, weights=tmp_path / "absent.safetensors")


def test_timms_weights_come_as_safetensors_only(
    tmp_path: Path, full: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file(full, tmp_path / "model.safetensors")
    asked: list[dict[str, str]] = []

    def download(**options: str) -> str:
        asked.append(options)
        return str(tmp_path / "model.safetensors")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    encoder, _ = build_encoder(SMALL, channels=3, weights="timm")
    assert asked == [{"repo_id": f"timm/{SMALL}.r160_in1k", "filename": "model.safetensors"}]
    assert all(torch.equal(value, full[key]) for key, value in encoder.state_dict().items())


def test_without_the_hub_the_sentence_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(**_: str) -> str:
        raise ConnectionError("no route to host\nand much more")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", offline)
    with pytest.raises(InputError) as caught:
        build_encoder(SMALL, channels=3, weights="timm")
    assert str(caught.value) == (
        f"The weights timm/{SMALL}.r160_in1k/model.safetensors of {SMALL} could not be downloaded: ConnectionError (no "
        "route to host). Set encoder.weights to a local .safetensors file, or to none."
    )
    with pytest.raises(InputError, match=r"timm has no weights for lcnet_035 on the Hugging Face hub\. Set encoder"):
        build_encoder("lcnet_035", channels=3, weights="timm")


@pytest.mark.slow
def test_timm_does_not_bring_weights_and_biases() -> None:
    program = "import sys\nfrom lopsided.models.encoders import build_encoder\nbuild_encoder('test_resnet')\n"
    program += "assert 'timm' in sys.modules and 'wandb' not in sys.modules\n"
    program += "import importlib.util\nassert importlib.util.find_spec('wandb')\n"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_shortage_of_memory_is_not_blamed_on_the_encoder(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.")

    monkeypatch.setattr(timm.models.resnet.ResNet, "forward", fail)
    with pytest.raises(RuntimeError, match="can't allocate memory") as caught:
        build_encoder("resnet10t", channels=1, image_size=(32, 32))
    assert not isinstance(caught.value, InputError)
