"""Export a model as a folder that timm and the Hugging Face hub read: weights, a config without code, and a card.

timm can represent a timm encoder with one linear layer on its features, at a fixed preprocessing. The linear layer of a
model contains its calibration, so that the softmax of timm's logits gives calibrated probabilities. timm knows no
decision rule: ``lopsided.json`` holds it, and the card states it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lopsided import files
from lopsided.errors import InputError, RunError, sentence
from lopsided.recipe import WEIGHT_NAMES
from lopsided.recipe.views import PLAIN, name_views
from lopsided.recipe.weights import JOINT

if TYPE_CHECKING:
    from torch import Tensor, nn

    from lopsided.models.model import Model, ModelCard

CONFIG, WEIGHTS, README, OWN = "config.json", "model.safetensors", "README.md", "lopsided.json"
TOLERANCE = 1e-4
"""Largest allowed difference of a logit between timm and the model, relative to the largest logit."""
CHECKED = 5
"""Random images with which an export is checked."""
_INSTEAD = "Use --to onnx, which can represent every model."


def check_hub(card: ModelCard) -> None:
    """Raise an error of one sentence if timm cannot represent a model."""
    from lopsided.models.encoders import is_mlp

    what = more = ""
    plain = "--set encoder.scaling=none" if card.views == PLAIN else "--views none --set encoder.scaling=none"
    if card.members > 1:
        what = f"an ensemble of {card.members} encoders"
        more = " Or train one encoder, with --final refit or --set fine_tune.blend=0."
    elif card.adapter is not None:
        what = "heads between the encoder and the classifier"
    elif card.head != "linear":
        what = f"a {card.head} classifier"
    elif is_mlp(card.encoder) or card.kind != "image":
        what = f"the encoder {card.encoder}, which is not a model of timm"
    elif JOINT in card.encoder:
        what, more = "joined encoders", " Or train with --recipe default --set encoder.scaling=none."
    elif card.scaling != "none":
        what, more = "scaled features", f" Or train with {plain}."
    elif card.views != PLAIN:
        what, more = f"the views {name_views(card.views)}", f" Or train with {plain}."
    if what:
        raise InputError(f"timm cannot represent {what}. {_INSTEAD}{more}")


def check_folder(out: Path) -> None:
    """Raise an error unless a folder can be written: it must not exist or must be empty, and its parent must exist."""
    if not out.absolute().parent.is_dir():
        raise InputError(sentence("--out must be in an existing folder", out))
    if os.path.lexists(out) and not (out.is_dir() and not any(out.iterdir())):
        do = "Choose another folder, or remove it; a card in it may hold your changes."
        raise InputError(sentence("--out must be a new or an empty folder", out, do))


def base_model(card: ModelCard) -> str | None:
    """Return the name on the hub of the pretrained weights that a model started from, or None if it has none."""
    from lopsided.models.encoders import timm_config

    if card.encoder_weights not in ("embedded", "timm") or JOINT in card.encoder:
        return None
    config = timm_config(card.encoder)
    return None if config is None else config.hf_hub_id


def export_hub(model: Model, card: ModelCard, out: str | os.PathLike[str], readme: str) -> dict[str, Any]:
    """Write the folder and return the result of its check: timm must give the logits of the model."""
    from safetensors.torch import save

    from lopsided.models.fast.small_maps import use_fast_paths

    check_hub(card)
    target = Path(out)
    check_folder(target)
    use_fast_paths(model, enabled=False)  # timm has no fast paths, and their names of weights are the same.
    model = model.cpu().eval()
    config = config_of(card)
    state = _state(model, card, config)
    weights = save(state, metadata={"format": "pt"})
    with files.disk_errors(target):
        scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.absolute().parent))
        try:
            (scratch / WEIGHTS).write_bytes(weights)
            _write_json(scratch / CONFIG, config)
            _write_json(scratch / OWN, _own(card, weights))
            (scratch / README).write_text(readme, encoding="utf-8")
            _copy_licence(card, scratch)
            difference = _check(model, card, scratch)
            scratch.chmod(0o777 & ~_umask())  # A temporary folder is for its owner alone.
            if target.is_dir():
                target.rmdir()
            scratch.rename(target)
        except BaseException:
            shutil.rmtree(scratch, ignore_errors=True)
            raise
    names = sorted(path.name for path in target.iterdir())
    return {"folder": str(target), "files": names, "checked": CHECKED, "difference": difference}


def config_of(card: ModelCard) -> dict[str, Any]:
    """Return the content of ``config.json``, in timm's form."""
    from lopsided.models.encoders import timm_config

    usual = timm_config(card.encoder)
    first, classifier, fixed = None, None, False
    if usual is not None:
        first, classifier, fixed = usual.first_conv, usual.classifier, usual.fixed_input_size
    arguments: dict[str, Any] = {} if card.channels == 3 else {"in_chans": card.channels}
    if fixed:
        arguments["img_size"] = list(card.shape[1:])
    return {
        "architecture": card.encoder.partition(".")[0],
        "num_classes": len(card.classes),
        "num_features": card.features,
        "label_names": list(card.classes),
        **({"model_args": arguments} if arguments else {}),
        "pretrained_cfg": {
            "tag": "lopsided",
            "custom_load": False,
            "input_size": list(card.shape),
            "fixed_input_size": fixed,
            "interpolation": card.interpolation,
            "crop_pct": 1.0,
            "crop_mode": "squash",  # The whole image is resized to a square.
            "mean": list(card.mean),
            "std": list(card.std),
            "num_classes": len(card.classes),
            "pool_size": None,
            "first_conv": first,
            "classifier": classifier,
        },
    }


def _state(model: Model, card: ModelCard, config: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the weights with the key names of timm, classifier included. Raise if timm's model has another head."""
    name = config["pretrained_cfg"]["classifier"]
    state = {key: value.detach().cpu().contiguous() for key, value in model.encoder.state_dict().items()}
    if isinstance(name, str):
        state |= {f"{name}.weight": model.classifier.weight.detach(), f"{name}.bias": model.classifier.bias.detach()}
        expected = _build(config).state_dict()
        if {key: value.shape for key, value in expected.items()} == {key: value.shape for key, value in state.items()}:
            return state
    raise InputError(f"timm's {card.encoder} has no single linear layer on its features. {_INSTEAD}")


def _build(config: Mapping[str, Any]) -> nn.Module:
    import timm

    arguments = config.get("model_args", {})
    found: nn.Module = timm.create_model(config["architecture"], num_classes=config["num_classes"], **arguments)
    return found


def _own(card: ModelCard, weights: bytes) -> dict[str, Any]:
    """Return what timm's config has no place for: decision rule, prior and calibration. No path of this machine."""
    content: dict[str, Any] = card.model_dump(mode="json")
    if card.encoder_weights not in WEIGHT_NAMES:
        content["encoder_weights"] = Path(card.encoder_weights).name
    return content | {"sha256": hashlib.sha256(weights).hexdigest()}


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")


def _copy_licence(card: ModelCard, folder: Path) -> None:
    """Copy the licence of the embedded weights, which it asks for."""
    if card.encoder_weights == "embedded":
        from lopsided.models.pretrained import embedded_file

        path = next(embedded_file().parent.glob("LICENSE-*.txt"))
        shutil.copyfile(path, folder / path.name)


def _check(model: Model, card: ModelCard, folder: Path) -> float:
    """Load the folder with timm. Return the largest relative difference of a logit; raise if it is too large."""
    import timm
    import torch
    from safetensors.torch import load_file

    config = json.loads((folder / CONFIG).read_bytes())
    loaded = timm.create_model(
        config["architecture"],
        pretrained=False,
        pretrained_cfg=config["pretrained_cfg"],
        num_classes=config["num_classes"],
        **config.get("model_args", {}),
    ).eval()
    loaded.load_state_dict(load_file(folder / WEIGHTS))  # timm's own loading of a folder could also read a pickle.
    images = torch.rand(CHECKED, *card.shape, generator=torch.Generator().manual_seed(0))
    mean, std = (torch.tensor(values).view(1, -1, 1, 1) for values in (card.mean, card.std))
    with torch.no_grad():
        expected, found = model(images), loaded((images - mean) / std)
    difference = float((found - expected).abs().max() / expected.abs().max().clamp(min=1.0))
    if not difference <= TOLERANCE:  # Written so that NaN fails.
        got = f"a difference of {difference:.2g}"
        raise RunError(sentence(f"timm must give the logits of the model within {TOLERANCE:g}", got, _INSTEAD))
    return difference


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
