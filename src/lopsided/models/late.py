"""Encoders whose layers are made when they are first needed.

If all features of a run are cached, only the weights of the encoder are needed: to find the features, and to write the
model. Importing timm and making the layers would take longer than the rest of such a run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from lopsided.files import reading_tensors
from lopsided.models.encoders import build_encoder
from lopsided.models.machine import arrange
from lopsided.models.pixels import pixel_width
from lopsided.models.pretrained import EMBEDDED, EMBEDDED_SHA256, embedded_file, preprocessing_of
from lopsided.recipe.weights import JOINT, misplaces_pixels, split_weights, trained_names

_BUFFERS = ("running_mean", "running_var", "num_batches_tracked", "mean", "std")
"""Names of tensors that are not trained: those of batch norm, and the normalisation of joined encoders."""


class LateEncoder(nn.Module):
    """The weights of an encoder, by the names that its layers have. ``make`` returns the encoder with its layers."""

    def __init__(self, name: str, state: Mapping[str, Tensor], make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.name, self._make = name, make
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


def late_encoder(name: str, state: Mapping[str, Tensor], shape: tuple[int, ...], *, fast: bool) -> LateEncoder:
    """Return an encoder with this state for images of this shape on a CPU. See ``arrange`` for ``fast``."""
    return LateEncoder(name, state, partial(_make, name, shape, fast))


def _make(name: str, shape: tuple[int, ...], fast: bool) -> nn.Module:
    encoder, _ = build_encoder(name, channels=shape[0], image_size=(shape[1], shape[2]))
    if fast:
        arrange(encoder, torch.device("cpu"), shape)
    return encoder


def embedded_state(name: str, weights: str) -> tuple[dict[str, Tensor], int] | None:
    """Return the weights of an embedded encoder, or of several joined ones, as its layers hold them, and the width.

    Return None unless all weights are embedded.
    """
    if misplaces_pixels(name):
        return None
    names = trained_names(name)
    files = split_weights(weights, names) if JOINT in name else [weights]
    if any(file != EMBEDDED or one not in EMBEDDED_SHA256 for one, file in zip(names, files, strict=True)):
        return None
    members = [_read(one) for one in names]
    own = pixel_width(name)
    width = sum(member["conv_head.weight"].shape[0] for member in members) + own
    if JOINT not in name:
        return members[0], width
    state = {f"members.{place}.{key}": value for place, one in enumerate(members) for key, value in one.items()}
    pixels = [preprocessing_of(one, EMBEDDED) for one in names]
    mean = [*(p.mean for p in pixels), *([(0.0, 0.0, 0.0)] if own else [])]
    std = [*(p.std for p in pixels), *([(1.0, 1.0, 1.0)] if own else [])]
    return {**state, **_table("mean", mean), **_table("std", std)}, width


def _table(name: str, rows: Sequence[Sequence[float]]) -> dict[str, Tensor]:
    return {name: torch.tensor(rows)}


def _read(name: str) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    with reading_tensors():
        state = {key: value.float() for key, value in load_file(embedded_file(name)).items()}
    # Each batch norm also counts its training steps. The file leaves this out.
    norms = [key.removesuffix("running_mean") for key in state if key.endswith("running_mean")]
    return state | {f"{norm}num_batches_tracked": torch.tensor(0) for norm in norms}
