"""The section of a model card on its use: programs that a stranger can copy."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lopsided.recipe.encoder_spec import EncoderSpec
from lopsided.reports.wording import clean


def use(card: Mapping[str, Any], name: str, parts: Sequence[str], *, timm: bool) -> Iterator[str]:
    """Yield the section on the use of a model. ``card`` holds the facts in ``model.json``."""
    yield "## How to use it"
    shape, grey = card["shape"], card["channels"] == 1
    mode = "L" if grey else "RGB"
    if parts:
        yield from _use_parts(card, name, parts, mode)
    elif timm:
        yield "With timm 1.0.16 or later:"
        yield (
            "```python\n"
            "import timm\nimport torch\nfrom PIL import Image\n\n"
            f'model = timm.create_model("local-dir:{code(name)}", pretrained=True).eval()  # or "hf-hub:OWNER/NAME"\n'
            "transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))\n"
            f'image = Image.open("image.png").convert("{mode}")\n'
            "with torch.no_grad():\n"
            "    probabilities = model(transform(image).unsqueeze(0)).softmax(dim=1)[0]\n"
            'print(dict(zip(model.pretrained_cfg["label_names"], probabilities.tolist())))\n'
            "```"
        )
        yield (
            "timm gives probabilities and no decision. `lopsided.json` holds the decision rule and the class shares. "
            "The calibration is part of the weights."
        )
    else:
        yield "With lopsided, from the run folder:"
        yield "```\nlopsided predict RUN images/ --out answers.csv\nlopsided export RUN --to onnx\n```"
    size = f"{shape[2]} x {shape[1]} pixels" if len(shape) == 3 else "their own size"
    colour = "grey" if grey else "colour"
    yield (
        f"Inputs are {colour} images of {size}: the whole image is resized ({card['interpolation']}, antialiased), "
        "upright by its EXIF orientation, with white behind transparent parts."
    )


VIEW_CODE = {
    "identity": "pixels",
    "hflip": "pixels.flip(-1)",
    "vflip": "pixels.flip(-2)",
    "rot180": "pixels.flip(-2, -1)",
    "rot90": "pixels.rot90(1, (-2, -1))",
    "rot270": "pixels.rot90(-1, (-2, -1))",
    "transpose": "pixels.transpose(-2, -1)",
    "transverse": "pixels.flip(-2, -1).transpose(-2, -1)",
}
"""The views of an image as torch writes them (``lopsided.models.model``)."""

_SCALING_CODE = {
    "none": (),
    "root": ("features = features.sign() * features.abs().sqrt()",),
    "cube-root": ("features = features.sign() * features.abs().pow(1 / 3)",),
}


def _use_parts(card: Mapping[str, Any], name: str, parts: Sequence[str], mode: str) -> Iterator[str]:
    """Yield two programs: the whole model with onnxruntime, and its encoders with timm."""
    height, width = card["shape"][1:]
    by = f"Image.Resampling.{card['interpolation'].upper()}"
    blocks = EncoderSpec.parse(card["encoder"]).blocks
    where = f'folder = "{code(name)}"  # or huggingface_hub.snapshot_download("OWNER/NAME")'
    shape = "[None, None]" if mode == "L" else ".transpose(2, 0, 1)[None]"
    yield "`model.onnx` is the whole model, decision included. It needs neither torch nor lopsided:"
    yield "\n".join(
        [
            "```python",
            'import os\n\nos.environ["ORT_DISABLE_TELEMETRY"] = "1"  # Else onnxruntime reports to its vendor.\n',
            "import json\n\nimport numpy as np\nimport onnxruntime\nfrom PIL import Image, ImageOps\n",
            where,
            'session = onnxruntime.InferenceSession(f"{folder}/model.onnx")',
            'classes = json.loads(session.get_modelmeta().custom_metadata_map["classes"])',
            f'image = ImageOps.exif_transpose(Image.open("image.png")).convert("{mode}")',
            f"image = image.resize(({width}, {height}), {by})",
            f"pixels = np.asarray(image, dtype=np.float32){shape} / 255",
            'label, probabilities = session.run(["label", "probabilities"], {"images": pixels})',
            "print(classes[label[0]], dict(zip(classes, probabilities[0].tolist())))",
            "```",
        ]
    )
    yield (
        f"The encoder{'s are' if len(parts) > 1 else ' is'} also here for timm 1.0.16 or later, for example to use the "
        "features or to train further:"
    )
    names = ", ".join(f'"{code(part)}"' for part in parts)
    views = ", ".join(VIEW_CODE[view] for view in card["views"])
    linear = card["adapter"] is None and card["head"] == "linear" and all(block.program for block in blocks)
    yield "\n".join(
        [
            "```python",
            *(["import json\n"] if linear else []),
            *(["import numpy as np"] if blocks else []),
            "import timm\nimport torch\nfrom PIL import Image",
            "from safetensors.torch import load_file\n" if linear else "",
            where,
            f'image = Image.open("image.png").convert("{mode}")',
            "features = []",
            f"for name in [{names}]:",
            '    encoder = timm.create_model(f"local-dir:{folder}/encoders/{name}", pretrained=True).eval()',
            "    pixels = timm.data.create_transform(**timm.data.resolve_model_data_config(encoder))(image)",
            "    with torch.no_grad():",
            f"        features.append(encoder(torch.stack([{views}])).mean(dim=0))",
            "features = torch.cat(features)",
            *_SCALING_CODE[card["scaling"]],
            *([_LENGTH_CODE[card["members"] > 1].format(**card)] if card["scaling"] != "none" else []),
            *(block.program.format(height=height, width=width, by=by, views=views) for block in blocks),
            *(_CLASSIFIER_CODE if linear else ["print(features.shape)"]),
            "```",
        ]
    )
    yield (
        "This gives probabilities and no decision. `lopsided.json` holds the decision rule and the class shares. The "
        "calibration is part of the classifier."
        if linear
        else "What follows on these features is in `classifier.safetensors`, as `lopsided.json` describes it, and in "
        "`model.onnx`."
    )


_LENGTH_CODE = (
    "features = features / features.norm()",
    "features = torch.cat([part / part.norm() for part in features.chunk({members})])",
)
"""How scaled features get length 1: all of them together, or those of each member of an ensemble."""
_CLASSIFIER_CODE = (
    'classifier = load_file(f"{folder}/classifier.safetensors")',
    'probabilities = (classifier["weight"] @ features + classifier["bias"]).softmax(dim=0)',
    'classes = json.load(open(f"{folder}/lopsided.json", encoding="utf-8"))["classes"]',
    "print(dict(zip(classes, probabilities.tolist())))",
)


def code(text: str) -> str:
    """Return an untrusted text for a string literal in an example."""
    return re.sub(r'["\\`\n]', "_", clean(text))
