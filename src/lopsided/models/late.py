"""Encoders whose layers are made when they are first needed.

If all features of a run are cached, only the weights of the encoder are needed: to find the features, and to write the
model. Importing timm and making the layers would take longer than the rest of such a run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from lopsided.files import reading_tensors
from lopsided.models.encoders import build_encoder
from lopsided.models.layout import Columns, Layout
from lopsided.models.machine import arrange
from lopsided.models.pretrained import EMBEDDED, EMBEDDED_SHA256, embedded_file, preprocessing_of
from lopsided.recipe.blocks import FINAL
from lopsided.recipe.encoder_spec import EncoderSpec

_BUFFERS = ("running_mean", "running_var", "num_batches_tracked", "mean", "std")
"""Names of tensors that are not trained: those of batch norm, and the normalisation of joined encoders."""


class LateEncoder(nn.Module):
    """The weights of an encoder, by the names that its layers have. ``make`` returns the encoder with its layers."""

    def __init__(self, name: str, state: Mapping[str, Tensor], layout: Layout, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.name, self.layout, self._make = name, layout, make
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


def late_encoder(
    name: str, state: Mapping[str, Tensor], layout: Layout, shape: tuple[int, ...], *, fast: bool
) -> LateEncoder:
    """Return an encoder with this state for images of this shape on a CPU. See ``arrange`` for ``fast``."""
    return LateEncoder(name, state, layout, partial(_make, name, shape, fast))


def _make(name: str, shape: tuple[int, ...], fast: bool) -> nn.Module:
    encoder, _ = build_encoder(name, channels=shape[0], image_size=(shape[1], shape[2]))
    if fast:
        arrange(encoder, torch.device("cpu"), shape)
    return encoder


def embedded_state(spec: EncoderSpec) -> tuple[dict[str, Tensor], Layout] | None:
    """Return the weights of embedded encoders, alone or joined, as their layers hold them, and their columns.

    Return None unless all weights are embedded and no block needs the layers.
    """
    if spec.reading("encoder") or any(p.weights != EMBEDDED or p.name not in EMBEDDED_SHA256 for p in spec.parts):
        return None
    members = [_read(name) for name in spec.names]
    groups = [Columns(FINAL, member["conv_head.weight"].shape[0], place) for place, member in enumerate(members)]
    if not spec.is_joined:
        return members[0], Layout(tuple(groups))
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
