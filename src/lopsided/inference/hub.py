"""Export a model as a folder that timm and the Hugging Face hub read: weights, a config without code, and a card.

timm can represent a timm encoder with one linear layer on its features, at a fixed preprocessing. Such a model is one
folder of timm. The linear layer of a model contains its calibration, so that the softmax of timm's logits gives
calibrated probabilities. timm knows no decision rule: ``lopsided.json`` holds it, and the card states it.

Other models, such as those of joined encoders, are a folder of parts: a folder of timm for each encoder, the
classifier, and one ONNX file that holds everything.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lopsided import files
from lopsided.errors import InputError, RunError, sentence
from lopsided.recipe.views import PLAIN, name_views

if TYPE_CHECKING:
    from torch import Tensor, nn

    from lopsided.data.images import Progress
    from lopsided.models.model import Model, ModelCard

CONFIG, WEIGHTS, README, OWN = "config.json", "model.safetensors", "README.md", "lopsided.json"
ENCODERS, CLASSIFIER, ONNX = "encoders", "classifier.safetensors", "model.onnx"
TOLERANCE = 1e-4
"""Largest allowed difference of a logit or a feature between timm and the model, relative to the largest one."""
CHECKED = 5
"""Random images with which an export is checked."""
_INSTEAD = "Use --to onnx, which can represent every model."


def check_hub(card: ModelCard) -> None:
    """Raise an error of one sentence if timm has no encoder of this kind."""
    if card.spec.parts[0].is_mlp or card.kind != "image":
        raise InputError(f"timm cannot represent the encoder {card.encoder}, which is not a model of timm. {_INSTEAD}")


def beyond_timm(card: ModelCard) -> str:
    """Return what one model of timm cannot represent of a model; empty if it can represent all of it."""
    kinds = {
        f"an ensemble of {card.members} encoders": card.members > 1,
        "joined encoders": card.spec.is_joined,
        "heads between the encoder and the classifier": card.adapter is not None,
        "scaled features": card.scaling != "none",
        f"the views {name_views(card.views)}": card.views != PLAIN,
        f"a {card.head} classifier": card.head != "linear",
        "columns of a table beside the image": bool(card.beside),
    }
    found = next((kind for kind, there in kinds.items() if there), "")
    return found or ("" if _has_linear_layer(card) else f"a linear layer on the features of {card.encoder}")


def part_names(card: ModelCard) -> list[str]:
    """Return the names of the folders of the encoders, in the order of their features; none for a model of timm."""
    if not beyond_timm(card):
        return []
    names = card.spec.names * card.members
    return [f"{place}-{name.partition('.')[0]}" for place, name in enumerate(names, start=1)]


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

    (part, *others) = card.spec.parts
    if part.weights not in ("embedded", "timm") or others:
        return None
    config = timm_config(part.name)
    return None if config is None else config.hf_hub_id


def export_hub(
    model: Model, card: ModelCard, out: str | os.PathLike[str], readme: str, progress: Progress | None = None
) -> dict[str, Any]:
    """Write the folder and return the result of its check.

    timm must give the logits of the model, or, in a folder of parts, the features of each encoder. onnxruntime must
    then give the probabilities of the model, too.
    """
    import torch

    from lopsided.models.small_maps import use_fast_paths

    check_hub(card)
    target = Path(out)
    check_folder(target)
    model.complete()
    use_fast_paths(model, enabled=False)  # timm has no fast paths, and their names of weights are the same.
    model = model.cpu().eval()
    parts = part_names(card)
    with files.disk_errors(target):
        scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.absolute().parent))
        try:
            with torch.no_grad():
                found = (
                    _write_parts(model, card, scratch, parts, progress) if parts else _write_whole(model, card, scratch)
                )
            (scratch / README).write_text(readme, encoding="utf-8")
            _copy_licence(card, scratch)
            umask = os.umask(0)  # It can only be read by setting it.
            os.umask(umask)
            scratch.chmod(0o777 & ~umask)  # A temporary folder is for its owner alone.
            if target.is_dir():
                target.rmdir()
            scratch.rename(target)
        except BaseException:
            shutil.rmtree(scratch, ignore_errors=True)
            raise
    names = sorted(path.relative_to(target).as_posix() for path in target.rglob("*") if path.is_file())
    return {"folder": str(target), "files": names, "checked": CHECKED, **found}


def _write_whole(model: Model, card: ModelCard, folder: Path) -> dict[str, Any]:
    """Write a model that timm can represent."""
    config = config_of(card)
    name = config["pretrained_cfg"]["classifier"]
    state = _state(model.encoder) | {f"{name}.{key}": value for key, value in _state(model.classifier).items()}
    _write_json(folder / OWN, _own(card, _write_timm(folder, config, state)))
    images = _random_images(card)
    return {"difference": _difference(model(images), _run_timm(folder, images), "logits")}


def _write_parts(
    model: Model, card: ModelCard, folder: Path, names: Sequence[str], progress: Progress | None
) -> dict[str, Any]:
    """Write the encoders as models of timm, what follows them, and the whole model as ONNX."""
    import torch
    from safetensors.torch import save

    from lopsided.inference.export import make_onnx

    content, onnx_difference, _ = make_onnx(model, card, "hub-folder", progress)
    (folder / ONNX).write_bytes(content)
    _write_json(folder / OWN, _own(card, content))
    rest = _state(model.classifier)
    if model.adapter is not None:
        rest |= {f"adapter.{key}": value for key, value in _state(model.adapter).items()}
    (folder / CLASSIFIER).write_bytes(save(rest, metadata={"format": "pt"}))
    images, features = _random_images(card), []
    for name, (encoder, mean, std) in zip(names, _encoders(model, card), strict=True):
        place = folder / ENCODERS / name
        place.mkdir(parents=True)
        config = config_of(card, name=name.partition("-")[2], mean=mean, std=std)
        _write_timm(place, config, _state(encoder))
        features.append(_run_timm(place, images))
    expected, layout = model.encode(images), model.layout
    if layout is not None:  # timm knows the final layers, and onnxruntime was compared with all columns.
        expected = torch.cat([layout.final_of(member) for member in expected.chunk(model.members, dim=1)], dim=1)
    difference = _difference(expected, torch.cat(features, dim=1), "features")
    return {"encoders": list(names), "difference": difference, "onnx_difference": onnx_difference}


def _encoders(model: Model, card: ModelCard) -> Iterator[tuple[nn.Module, list[float], list[float]]]:
    """Yield the encoders of a model in the order of their features, each with mean and std of its pixels in [0, 1]."""
    from lopsided.models.blocks.block import FeatureBlock, Tapped
    from lopsided.models.encoders import members_of

    for member, mean, std in members_of(model.encoder, card.mean, card.std):
        if not isinstance(member, FeatureBlock):  # A block is no model of timm.
            yield member.encoder if isinstance(member, Tapped) else member, mean.tolist(), std.tolist()


def config_of(
    card: ModelCard, *, name: str = "", mean: Sequence[float] = (), std: Sequence[float] = ()
) -> dict[str, Any]:
    """Return the content of ``config.json``, in timm's form: of the whole model, or of one encoder of this name."""
    from lopsided.models.encoders import timm_config

    architecture = name or card.encoder.partition(".")[0]
    usual = timm_config(architecture if name else card.encoder)
    first, classifier, fixed = None, None, False
    if usual is not None:
        first, classifier, fixed = usual.first_conv, usual.classifier, usual.fixed_input_size
    arguments: dict[str, Any] = {} if card.channels == 3 else {"in_chans": card.channels}
    if fixed:
        arguments["img_size"] = list(card.shape[1:])
    num_classes = 0 if name else len(card.classes)
    return {
        "architecture": architecture,
        "num_classes": num_classes,
        **({} if name else {"num_features": card.features, "label_names": list(card.classes)}),
        **({"model_args": arguments} if arguments else {}),
        "pretrained_cfg": {
            "tag": "lopsided",
            "custom_load": False,
            "input_size": list(card.shape),
            "fixed_input_size": fixed,
            "interpolation": card.interpolation,
            "crop_pct": 1.0,
            "crop_mode": "squash",  # The whole image is resized to a square.
            "mean": list(mean or card.mean),
            "std": list(std or card.std),
            "num_classes": num_classes,
            "pool_size": None,
            "first_conv": first,
            "classifier": classifier,
        },
    }


def _has_linear_layer(card: ModelCard) -> bool:
    """Whether timm's model has one linear layer on the features of its encoder, and nothing else."""
    config = config_of(card)
    name = config["pretrained_cfg"]["classifier"]
    whole, bare = (
        {key: value.shape for key, value in _build({**config, "num_classes": number}).state_dict().items()}
        for number in (len(card.classes), 0)
    )
    layer = {f"{name}.weight": (len(card.classes), card.features), f"{name}.bias": (len(card.classes),)}
    return isinstance(name, str) and whole == bare | layer


def _build(config: Mapping[str, Any], **others: Any) -> nn.Module:
    import timm

    arguments = {**config.get("model_args", {}), **others}
    found: nn.Module = timm.create_model(config["architecture"], num_classes=config["num_classes"], **arguments)
    return found


def _state(network: nn.Module) -> dict[str, Tensor]:
    return {key: value.detach().cpu().contiguous() for key, value in network.state_dict().items()}


def _write_timm(folder: Path, config: Mapping[str, Any], state: Mapping[str, Tensor]) -> bytes:
    """Write a folder of timm. Return the bytes of the weights."""
    from safetensors.torch import save

    content = save(dict(state), metadata={"format": "pt"})
    (folder / WEIGHTS).write_bytes(content)
    _write_json(folder / CONFIG, config)
    return content


def _own(card: ModelCard, weights: bytes) -> dict[str, Any]:
    """Return what timm's config has no place for: decision rule, prior and calibration. No path of this machine."""
    content: dict[str, Any] = card.model_dump(mode="json")
    content["encoder_weights"] = card.spec.without_folders()
    return content | {"sha256": hashlib.sha256(weights).hexdigest()}


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")


def _copy_licence(card: ModelCard, folder: Path) -> None:
    """Copy the licence of the embedded weights, which it asks for."""
    if card.spec.is_embedded:
        from lopsided.models.pretrained import embedded_file

        path = next(embedded_file().parent.glob("LICENSE-*.txt"))
        shutil.copyfile(path, folder / path.name)


def _random_images(card: ModelCard) -> Tensor:
    import torch

    return torch.rand(CHECKED, *card.shape, generator=torch.Generator().manual_seed(0))


def _run_timm(folder: Path, images: Tensor) -> Tensor:
    """Return what timm makes of images in [0, 1], with the config and the weights in a folder."""
    import torch
    from safetensors.torch import load_file

    config = json.loads((folder / CONFIG).read_bytes())
    facts = config["pretrained_cfg"]
    loaded = _build(config, pretrained=False, pretrained_cfg=facts).eval()
    loaded.load_state_dict(load_file(folder / WEIGHTS))  # timm's own loading of a folder could also read a pickle.
    mean, std = (torch.tensor(facts[name]).view(1, -1, 1, 1) for name in ("mean", "std"))
    with torch.no_grad():
        found: Tensor = loaded((images - mean) / std)
    return found


def _difference(expected: Tensor, found: Tensor, what: str) -> float:
    """Return the largest difference, relative to the largest number; raise if it is too large."""
    difference = float((found - expected).abs().max() / expected.abs().max().clamp(min=1.0))
    if not difference <= TOLERANCE:  # Written so that NaN fails.
        got = f"a difference of {difference:.2g}"
        raise RunError(sentence(f"timm must give the {what} of the model within {TOLERANCE:g}", got, _INSTEAD))
    return difference
