"""Encoders: any timm model by name, or an MLP for plain vectors. Weights are safetensors, which cannot run code.

The layers of an embedded encoder are made when they are first needed (``LateEncoder``). If all features of a run are
cached, only the weights are needed: to find the features, and to write the model. Importing timm and making the layers
would take longer than the rest of such a run.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from lopsided.errors import InputError, is_out_of_memory, sentence
from lopsided.files import check_regular, reading_tensors, reason
from lopsided.models.blocks.block import Columns, Layout, Tapped
from lopsided.models.machine import arrange, seeded
from lopsided.models.pretrained import (
    EMBEDDED,
    EMBEDDED_SHA256,
    check_embedded,
    download,
    embedded_file,
    preprocessing_of,
    unknown_encoder,
)
from lopsided.recipe.blocks import FINAL
from lopsided.recipe.encoder_spec import MLP_NAME, EncoderSpec

MLP_HIDDEN = (128, 128)
"""Layer widths of the encoder "mlp"; "mlp-512-64" has layers of 512 and 64."""
IDENTITY = "identity"
"""The encoder without layers: the features are the inputs."""

_CLASSIFIERS = ("fc", "classifier", "head", "heads")


def build_encoder(
    name: str,
    *,
    channels: int = 3,
    image_size: int | tuple[int, int] | None = None,
    in_features: int | None = None,
    weights: str | os.PathLike[str] = "none",
    seed: int = 0,
) -> tuple[nn.Module, int]:
    """Build an encoder and return it with the length of its feature vectors.

    - ``name``: a timm model, "mlp", or "identity". The last two take vectors of ``in_features`` numbers, or flatten
      images of a fixed size. "identity" returns its inputs as features. Several timm models with "+" between them are
      joined: each gets the images with its own normalisation, and the features are those of all of them. Feature
      blocks (``lopsided.recipe.blocks``) may follow them.
    - ``image_size``: side, or height and width, of the images. If given, the encoder runs once on such an image, so
      that a mismatch raises here and not in the middle of a run.
    - ``weights``: "none" draws the weights from ``seed``. "embedded" loads the file in the package, which has the
      weights of a few encoders. "timm" loads timm's weights from the Hugging Face hub, only as safetensors, and
      "hf-hub:OWNER/NAME@COMMIT" those of somebody else. A path loads a local safetensors file with the key names of
      timm or torchvision. A classifier in the file is ignored. For 1-channel images, the 3 channels of the first
      convolution are summed.

    The initial weights depend only on ``seed``. The global random state does not change.
    """
    size = (image_size, image_size) if isinstance(image_size, int) else image_size
    spec = EncoderSpec.parse(name, os.fspath(weights))
    if spec.is_joined:
        return _joined(spec, channels, size, seed)
    with seeded_init(seed, "encoder"):
        is_mlp = spec.parts[0].is_mlp
        encoder = _mlp(name, channels, size, in_features) if is_mlp else _timm(name, channels, size)
    if spec.weights == EMBEDDED:
        check_embedded(name)
        load_weights(encoder, embedded_file(name), name)
    elif spec.weights == "timm" or spec.parts[0].is_hub:
        load_weights(encoder, download(name, spec.weights).path, name)
    elif spec.weights != "none":
        load_weights(encoder, Path(spec.weights), name)
    return encoder, _num_features(encoder, name, channels, size)


def _joined(spec: EncoderSpec, channels: int, size: tuple[int, int] | None, seed: int) -> tuple[nn.Module, int]:
    """Build encoders and blocks side by side. Each encoder has the normalisation that belongs to its weights, if any.

    A block that reads an encoder shares its pass. Any other block gets the images as they are.
    """
    if channels != 3:
        raise InputError(sentence("joined encoders must have images of 3 channels", f"{channels} channels"))
    members: list[nn.Module] = []
    groups: list[Columns] = []
    for place, part in enumerate(spec.parts):
        encoder, width = build_encoder(part.name, image_size=size, weights=part.weights, seed=seed)
        inner = [(block, block.load()(encoder)) for block in spec.reading("encoder")]
        members.append(Tapped(encoder, [module for _, module in inner]) if inner else encoder)
        groups.append(Columns(FINAL, width, place))
        groups += [Columns(block, width, place) for block, module in inner for width in module.widths]
    for place, block in enumerate(spec.reading("image"), start=len(spec.parts)):
        members.append(module := block.load()())
        groups += [Columns(block, width, place) for width in module.widths]
    joined = Ensemble(members, channels, Layout(tuple(groups)))
    for place, part in enumerate(spec.parts):
        if part.weights != "none":
            pixels = preprocessing_of(part.name, part.weights)
            joined.mean[place], joined.std[place] = torch.tensor(pixels.mean), torch.tensor(pixels.std)
    return joined, sum(group.width for group in groups)


def seeded_init(seed: int, *names: str) -> AbstractContextManager[None]:
    """Seed the initial weights inside the block by the run's seed and these names. The global state does not change."""
    return seeded(torch.device("cpu"), seed, "init", *names)


class MLPEncoder(nn.Sequential):
    """Linear layers on flattened inputs, each followed by ReLU."""

    def __init__(self, in_features: int, hidden: Sequence[int] = MLP_HIDDEN) -> None:
        layers: list[nn.Module] = [nn.Flatten()]
        for width in hidden:
            layers += [nn.Linear(in_features, width), nn.ReLU()]
            in_features = width
        super().__init__(*layers)
        self.num_features = in_features


def _mlp(name: str, channels: int, size: tuple[int, int] | None, in_features: int | None) -> nn.Module:
    match = MLP_NAME.fullmatch(name)
    assert match is not None
    hidden = () if name == IDENTITY else tuple(int(width) for width in match[1].split("-")[1:]) or MLP_HIDDEN
    if 0 in hidden:
        raise InputError(sentence("the layers of an mlp must have a width >= 1", name))
    if in_features is None and size is not None:
        in_features = channels * size[0] * size[1]
    if in_features is None:
        raise InputError(f"The encoder {name} needs images of a fixed size. Set image_size.")
    return MLPEncoder(in_features, hidden)


def _timm(name: str, channels: int, size: tuple[int, int] | None) -> nn.Module:
    timm = import_timm()
    options: dict[str, Any] = {}
    config = timm_config(name)
    if size is not None and config is not None and config.fixed_input_size:
        options["img_size"] = size
    try:
        model: nn.Module = timm.create_model(name, pretrained=False, num_classes=0, in_chans=channels, **options)
    except (TypeError, ValueError, AssertionError, RuntimeError) as error:
        where = "" if size is None else f" of {size[1]} x {size[0]}"
        problem = f"The encoder {name} cannot take images of {channels} channels{where}"
        raise InputError(f"{problem}: {_first_line(error)}.") from error
    return model


def import_timm() -> ModuleType:
    """Return timm. It is not allowed to import W&B, which it does where that is installed.

    That import takes a second and patches ``sys.stdout``. Training scripts of timm need it, but its models do not.
    """
    if "timm" in sys.modules or "wandb" in sys.modules:
        import timm

        return timm
    sys.modules["wandb"] = None  # type: ignore[assignment]  # Python's own way to say that there is no such module.
    try:
        import timm
    finally:
        del sys.modules["wandb"]
    return timm


def timm_config(name: str) -> Any:
    """Return timm's configuration of a model. Raise if timm has no such model; hub addresses are not allowed."""
    timm = import_timm()
    if not timm.is_model(name):
        raise unknown_encoder(name, timm.list_models())
    try:
        return timm.get_pretrained_cfg(name)
    except RuntimeError as error:
        must = f"the part of encoder.name after the dot must be one of timm's tags for {name.partition('.')[0]}"
        raise InputError(sentence(must, repr(name.partition(".")[2]), "Leave this part out.")) from error


def _num_features(encoder: nn.Module, name: str, channels: int, size: tuple[int, int] | None) -> int:
    if isinstance(encoder, MLPEncoder):
        return encoder.num_features
    if size is None:
        return int(getattr(encoder, "head_hidden_size", None) or encoder.num_features)  # type: ignore[arg-type]
    problem = f"The encoder {name} cannot turn an image of {size[1]} x {size[0]} into one feature vector"
    do = "Set another image_size, or use another encoder."
    try:
        with torch.no_grad():
            like = next(encoder.parameters(), torch.empty(0))
            features = encoder.eval()(torch.zeros(1, channels, *size, device=like.device))
    except (RuntimeError, AssertionError, ValueError) as error:
        if is_out_of_memory(error):
            raise
        raise InputError(f"{problem}: {_first_line(error)}. {do}") from error
    finally:
        encoder.train()
    if not isinstance(features, Tensor) or features.ndim != 2:
        got = (
            f"its output has shape {tuple(features.shape)}"
            if isinstance(features, Tensor)
            else "it has several outputs"
        )
        raise InputError(f"{problem}: {got}. Use another encoder.")
    return features.shape[1]


def load_weights(encoder: nn.Module, path: Path, name: str = "the encoder") -> None:
    """Load a safetensors file into an encoder. The file must hold exactly the encoder's weights, in their shapes."""
    from safetensors.torch import load_file

    try:
        check_regular(path)
        with reading_tensors():
            found = load_file(path)
    except (OSError, ValueError) as error:
        got = f"{path} ({reason(error)})"
        raise InputError(sentence("encoder.weights must be a readable safetensors file", got)) from None
    own = encoder.state_dict()
    state = _fitted(found, own, encoder)
    problem = _problem(state, own)
    convert = getattr(sys.modules[type(encoder).__module__], "checkpoint_filter_fn", None)
    if problem is not None and convert is not None:
        # This timm function converts other key names, and position embeddings of other sizes.
        try:
            state = _fitted(convert(dict(found), encoder), own, encoder)
        except Exception:  # The function may fail on files it was not written for.
            state = {}
        problem = problem if _problem(state, own) is not None else None
    if problem is not None:
        do = "Use a file for this encoder with the key names of timm or torchvision."
        raise InputError(f"{path} does not fit {name}: {problem}. {do}")
    encoder.load_state_dict(state, strict=False)


def _fitted(found: Mapping[str, Tensor], own: Mapping[str, Tensor], encoder: nn.Module) -> dict[str, Tensor]:
    """Return the weights without a classifier, with the first convolution adapted to the number of channels."""
    from timm.models import adapt_input_conv

    config = getattr(encoder, "pretrained_cfg", None) or {}
    heads = {*_CLASSIFIERS, *_names(config.get("classifier"))}
    state = {
        key: value for key, value in found.items() if key in own or not any(key.startswith(f"{h}.") for h in heads)
    }
    for conv in _names(config.get("first_conv")):
        key = f"{conv}.weight"
        if key in state and key in own and state[key].shape != own[key].shape and state[key].ndim == 4:
            state[key] = adapt_input_conv(own[key].shape[1], state[key])
    return state


def _problem(state: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> str | None:
    """Return why a file does not fit: missing, unknown or broken weights, or other shapes. Return None if it fits."""
    # A count of batches is not a weight, and converted files often lack it.
    missing = [key for key in own if key not in state and not key.endswith("num_batches_tracked")]
    if missing:
        return f"it has no {_some(missing)}"
    broken = [key for key, value in state.items() if value.is_complex() or not value.float().isfinite().all()]
    if broken:
        return f"the numbers in {_some(broken)} are not finite"
    unknown = [key for key in state if key not in own]
    if unknown:
        return f"it also holds {_some(unknown)}"
    for key, value in state.items():
        if value.shape != own[key].shape:
            return f"{key} has shape {tuple(value.shape)}, but must have {tuple(own[key].shape)}"
    return None


def _some(keys: list[str]) -> str:
    return keys[0] + (f" and {len(keys) - 1} more" if len(keys) > 1 else "")


def _names(value: object) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list | tuple) else ()


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


_BUFFERS = ("running_mean", "running_var", "num_batches_tracked", "mean", "std")
"""Names of tensors that are not trained: those of batch norm, and the normalisation of joined encoders."""


class LateEncoder(nn.Module):
    """The weights of an encoder, by the names that its layers have. ``make`` returns the encoder with its layers."""

    def __init__(self, name: str, state: Mapping[str, Tensor], layout: Layout, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.name, self.layout, self._make = name, layout, make
        self.digests: dict[str, str] = {}
        for key, value in state.items():
            *path, name = key.split(".")
            module: nn.Module = self
            for part in path:
                if part not in module._modules:
                    module.add_module(part, nn.Module())
                module = module.get_submodule(part)
            if name in _BUFFERS:
                module.register_buffer(name, value)
            else:
                module.register_parameter(name, nn.Parameter(value))

    def made(self) -> nn.Module:
        """Return the encoder with its layers and these weights."""
        encoder = self._make()
        encoder.load_state_dict(self.state_dict())
        return encoder.to(next(self.buffers()).device).train(self.training)


def weights_hash(encoder: nn.Module, start: str = "") -> str:
    """Return the SHA-256 of the weights of an encoder whose names begin with ``start``.

    That of an encoder without layers, which nothing changes, is computed once.
    """
    known = encoder.digests if isinstance(encoder, LateEncoder) else {}
    if start not in known:
        digest = hashlib.sha256()
        for key, value in sorted(encoder.state_dict().items()):
            # A count of training steps does not change the features.
            if key.startswith(start) and not key.endswith("num_batches_tracked"):
                array = value.detach().cpu().numpy()
                digest.update(f"{key.removeprefix(start)} {array.dtype} {array.shape}\n".encode())
                digest.update(array.tobytes())  # In the order of the indices, whatever the memory layout is.
        known[start] = digest.hexdigest()
    return known[start]


def late_encoder(
    name: str, state: Mapping[str, Tensor], layout: Layout, shape: tuple[int, ...], *, fast: bool
) -> LateEncoder:
    """Return an encoder with this state for images of this shape on a CPU. See ``arrange`` for ``fast``."""
    return LateEncoder(name, state, layout, partial(_make, name, shape, fast))


@lru_cache(maxsize=1)
def embedded_encoder(spec: EncoderSpec, shape: tuple[int, ...], fast: bool) -> LateEncoder | None:
    """Return the encoder of ``embedded_state``, or None. The models of a run share it, for none of them trains it."""
    found = embedded_state(spec)
    return None if found is None else late_encoder(spec.name, *found, shape, fast=fast)


def _make(name: str, shape: tuple[int, ...], fast: bool) -> nn.Module:
    encoder, _ = build_encoder(name, channels=shape[0], image_size=(shape[1], shape[2]))
    if fast:
        arrange(encoder, torch.device("cpu"), shape)
    return encoder


def embedded_state(spec: EncoderSpec) -> tuple[dict[str, Tensor], Layout] | None:
    """Return the weights of embedded encoders, alone or joined, as their layers hold them, and their columns.

    Return None unless all weights are embedded and no block needs the layers.
    """
    if any(p.weights != EMBEDDED or p.name not in EMBEDDED_SHA256 for p in spec.parts):
        return None
    members = [_read(name) for name in spec.names]
    groups: list[Columns] = []
    for place, member in enumerate(members):
        groups.append(Columns(FINAL, member["conv_head.weight"].shape[0], place))
        for block in spec.reading("encoder"):
            widths = block.load().widths_by(member)
            if widths is None:
                return None
            groups += [Columns(block, width, place) for width in widths]
    if not spec.is_joined:
        return members[0], Layout(tuple(groups))
    if spec.reading("encoder"):
        members = [{f"encoder.{key}": value for key, value in member.items()} for member in members]  # See Tapped.
    blocks = spec.reading("image")
    for place, block in enumerate(blocks, start=len(members)):
        groups += [Columns(block, width, place) for width in block.load()().widths]
    state = {f"members.{place}.{key}": value for place, one in enumerate(members) for key, value in one.items()}
    pixels = [preprocessing_of(name, EMBEDDED) for name in spec.names]
    mean = [*(p.mean for p in pixels), *[(0.0, 0.0, 0.0)] * len(blocks)]
    std = [*(p.std for p in pixels), *[(1.0, 1.0, 1.0)] * len(blocks)]
    return {**state, "mean": torch.tensor(mean), "std": torch.tensor(std)}, Layout(tuple(groups))


def _read(name: str) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    with reading_tensors():
        state = {key: value.float() for key, value in load_file(embedded_file(name)).items()}
    # Each batch norm also counts its training steps. The file leaves this out.
    norms = [key.removesuffix("running_mean") for key in state if key.endswith("running_mean")]
    return state | {f"{norm}num_batches_tracked": torch.tensor(0) for norm in norms}


class Ensemble(nn.Module):
    """Encoders side by side, each with its own normalisation of the pixels. The output joins their features.

    ``layout`` says what the columns of joined encoders are. An ensemble of models has none of its own.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, members: Sequence[nn.Module], channels: int, layout: Layout | None = None) -> None:
        super().__init__()
        self.layout = layout
        self.members = nn.ModuleList(members)
        self.register_buffer("mean", torch.zeros(len(members), channels))
        self.register_buffer("std", torch.ones(len(members), channels))

    def forward(self, x: Tensor) -> Tensor:
        """Return features (n, f_1 + f_2 + ...) of images (n, c, h, w)."""
        shape = (len(self.members), 1, -1, 1, 1)
        scaled = zip(self.members, self.mean.view(shape), self.std.view(shape), strict=True)
        return torch.cat([member((x - mean) / std) for member, mean, std in scaled], dim=1)


def members_of(
    encoder: nn.Module, mean: Sequence[float], std: Sequence[float]
) -> list[tuple[nn.Module, Tensor, Tensor]]:
    """Return each encoder or block of an encoder, with mean and deviation of its pixels in [0, 1], in double precision.

    ``mean`` and ``std`` are those of the model. The members of an ensemble normalise the pixels once more.
    """
    shift, scale = torch.tensor(mean, dtype=torch.float64), torch.tensor(std, dtype=torch.float64)
    if not isinstance(encoder, Ensemble):
        return [(encoder, shift, scale)]
    own = zip(encoder.members, encoder.mean.double().cpu(), encoder.std.double().cpu(), strict=True)
    return [(member, shift + scale * first, scale * second) for member, first, second in own]
