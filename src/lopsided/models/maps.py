"""Where a model looked: how much each position of an image speaks for a class.

A classifier gets features that are means over positions. If they are not scaled, the classifier is linear in them, and
the contribution of a position is exact: the sum of its activations times the weights of the class (class activation
map; Zhou et al., 2016). Otherwise the weights are those of the gradient at the image. What a feature block reads, such
as the deviations of a layer or the colours of the image, contributes by its gradient in the same way, each block by
itself: no gradient flows from a block into the layers before those that it reads.

The logit is that of a class minus the mean logit of the other classes. Maps of all views, encoders and blocks are added
up on one grid.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

from lopsided.errors import InputError
from lopsided.models.blocks.block import FeatureBlock, Tapped
from lopsided.models.blocks.positions import SIDE as POSITIONS
from lopsided.models.encoders import Ensemble
from lopsided.models.model import Model, look

SIDE = 28
"""Side of the grid of a map."""
_TURNED_BACK = {"rot90": "rot270", "rot270": "rot90"}
"""The views that another view undoes. Every other view undoes itself."""


def class_maps(model: Model, images: Tensor, labels: Tensor, beside: Tensor | None = None) -> Tensor:
    """Return how much each position of images in [0, 1] (n, c, h, w) speaks for a class (n,): (n, SIDE, SIDE).

    ``beside`` are the features of columns of a table, if the model has any.
    """
    model.complete()
    was_training = model.training
    model.eval()
    try:
        with torch.enable_grad():
            parts: list[tuple[str, Tensor]] = []
            views = []
            for view in model.views:
                x = ((look(images, view) - model.mean) / model.std).float()
                columns, leaves = _columns(model.encoder, x)
                views.append(columns)
                parts += [(view, leaf) for leaf in leaves]
            inputs = model.adapt(torch.stack(views).mean(dim=0), beside)
            local = torch.from_numpy(model.local).to(inputs.device)
            single = model.classifier.maps(inputs.detach(), labels)
            # A distance of positions has its own map: the gradient of a maximum knows one position only.
            logits = model.classifier(inputs.index_copy(1, local, inputs[:, local].detach()))
            own = logits.gather(1, labels[:, None]).squeeze(1)
            others = (logits.sum(dim=1) - own) / (logits.shape[1] - 1)
            leaves = [leaf for _, leaf in parts]
            gradients = torch.autograd.grad((own - others).sum(), leaves, allow_unused=True, materialize_grads=True)
    finally:
        model.train(was_training)
    total = torch.zeros(len(images), SIDE, SIDE, device=images.device)
    for (view, leaf), gradient in zip(parts, gradients, strict=True):
        finite = gradient.nan_to_num(0, 0, 0)  # A deviation of zero, or the root of a zero, has no direction.
        placed = _on_grid((finite * leaf.detach()).sum(dim=1, keepdim=True))
        total += look(placed, _TURNED_BACK.get(view, view)).squeeze(1)
    for values in single:
        grid = values.detach().reshape(len(images), -1, POSITIONS, POSITIONS)
        total += _on_grid(grid.sum(dim=1, keepdim=True)).squeeze(1)
    return total


def _columns(encoder: nn.Module, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return the features of images, and the maps with positions (n, c, h, w) that they are computed from."""
    if isinstance(encoder, Ensemble):
        shape = (len(encoder.members), 1, -1, 1, 1)
        members = zip(encoder.members, encoder.mean.view(shape), encoder.std.view(shape), strict=True)
        parts = [_columns(member, (x - mean) / std) for member, mean, std in members]
        return torch.cat([columns for columns, _ in parts], dim=1), [leaf for _, leaves in parts for leaf in leaves]
    if isinstance(encoder, FeatureBlock):
        middle = x.mean(dim=(2, 3), keepdim=True)  # A uniform image of the same colour speaks for nothing.
        leaf = (x - middle).detach().requires_grad_()
        return encoder(leaf + middle), [leaf]
    if isinstance(encoder, Tapped):
        return _tapped(encoder, x)
    return _final(encoder, _features(encoder, x))


def _tapped(encoder: Tapped, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    outputs: dict[str, Tensor] = {}

    def listen(name: str) -> torch.utils.hooks.RemovableHandle:
        layer = encoder.encoder.get_submodule(name)
        return layer.register_forward_hook(lambda _, __, output: outputs.update({name: output}))

    handles = [listen(name) for name in {name: None for block in encoder.blocks for name in block.taps}]
    try:
        last = _features(encoder.encoder, x)
    finally:
        for handle in handles:
            handle.remove()
    columns, leaves = _final(encoder.encoder, last)
    parts = [columns]
    for block in encoder.blocks:
        own = [outputs[name].detach().requires_grad_() for name in block.taps]
        parts.append(block(*own))
        leaves += own
    return torch.cat(parts, dim=1), leaves


def _features(encoder: nn.Module, x: Tensor) -> Tensor:
    if not hasattr(encoder, "forward_features") or not hasattr(encoder, "forward_head"):
        raise InputError("The features of this encoder have no positions in the image, so there are no maps of it.")
    with torch.no_grad():
        found: Tensor = encoder.forward_features(x)  # type: ignore[operator]
    return found


def _final(encoder: nn.Module, last: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return the final layer of an encoder, and the map before it, whatever order of dimensions the encoder has."""
    width = int(getattr(encoder, "num_features", last.shape[1]))
    if last.ndim == 3:  # Tokens of a transformer: those of positions follow the others.
        first = int(getattr(encoder, "num_prefix_tokens", 0))
        side = round((last.shape[1] - first) ** 0.5)
        if side * side != last.shape[1] - first:
            raise InputError("The positions of this encoder are no square, so there are no maps of it.")
        leaf = last[:, first:].transpose(1, 2).reshape(len(last), -1, side, side).detach().requires_grad_()
        tokens = torch.cat([last[:, :first], leaf.flatten(2).transpose(1, 2)], dim=1)
        return encoder.forward_head(tokens), [leaf]  # type: ignore[operator]
    channels_last = last.ndim == 4 and last.shape[1] != width and last.shape[-1] == width
    leaf = (last.permute(0, 3, 1, 2) if channels_last else last).detach().requires_grad_()
    placed = leaf.permute(0, 2, 3, 1) if channels_last else leaf
    return encoder.forward_head(placed), [leaf]  # type: ignore[operator]


def _on_grid(values: Tensor) -> Tensor:
    """Return values (n, 1, h, w) on the grid of all maps, with the same sum."""
    total = values.sum(dim=(2, 3), keepdim=True)
    if values.shape[2] > SIDE:
        placed = interpolate(values, (SIDE, SIDE), mode="area")
    else:
        placed = interpolate(values, (SIDE, SIDE), mode="bilinear", align_corners=False)
    scale = values[0, 0].numel() / SIDE**2
    placed = placed * scale
    return placed + (total - placed.sum(dim=(2, 3), keepdim=True)) / SIDE**2


def check_positions(names: Sequence[str]) -> None:
    """Raise if encoders have no positions, which an MLP has not."""
    flat = [name for name in names if name.startswith(("mlp", "identity"))]
    if flat:
        raise InputError(f"The features of {flat[0]} have no positions in the image, so there are no maps of it.")
