"""CL, FCL, ACL and AFCL as functions and as modules."""

from __future__ import annotations

from typing import Literal, TypedDict, Unpack

import torch
from torch import Tensor, nn

from lopsided.losses._kernel.autograd import TiledRows, TiledTotal
from lopsided.losses._kernel.checks import (
    Arguments,
    Reference,
    check_ignore_index,
    check_inputs,
    check_settings,
    check_temperature,
    check_tile,
    check_word,
)
from lopsided.losses._kernel.dense import dense_values
from lopsided.losses._kernel.formulas import parity_eta
from lopsided.losses.objective import AnchorObjective, Samples

Normalization = Literal["paper", "released"]
Reduction = Literal["mean", "sum", "none"]
Tile = int | Literal["auto"] | None
EtaUnit = Literal["absolute", "parity"]
Contrast = Tensor | Literal["all", "reference"]
_Settings = tuple[float, float, float, bool, bool]  # eta, gamma, temperature, in units of parity, released formula

__all__ = [
    "AsymmetricContrastiveLoss",
    "AsymmetricFocalContrastiveLoss",
    "ContrastiveLoss",
    "FocalContrastiveLoss",
    "asymmetric_contrastive_loss",
    "asymmetric_focal_contrastive_loss",
    "contrastive_loss",
    "focal_contrastive_loss",
    "parity_eta",
]


def asymmetric_focal_contrastive_loss(
    z: Tensor,
    y: Tensor | None,
    *,
    eta: float = 0.0,
    gamma: float = 0.0,
    temperature: float | Tensor = 0.07,
    reference: Reference | None = None,
    positive: Tensor | None = None,
    contrast: Contrast = "all",
    ignore_index: int | None = None,
    normalization: Normalization = "paper",
    reduction: Reduction = "mean",
    tile: Tile = "auto",
) -> Tensor:
    r"""Asymmetric focal contrastive loss (AFCL), Eq. (26) of Vito & Stefanus, 2022.

    p_ij is the softmax of z_i . z_j / temperature over all contrast samples except the anchor itself. P_i are the
    contrast samples of the anchor's class, N_i all others. The loss of an anchor is::

        - 1/|P_i| sum_{j in P_i} (1 - p_ij)^gamma log p_ij  -  eta/|N_i| sum_{j in N_i} log(1 - p_ij)

    A sum over an empty set is 0. The loss of an anchor with a single contrast sample is also 0, because its p is 1 for
    any features. This function does not normalise the features; normalise them first, or use the module.

    Args:
        z: Features (n, d), or (n, views, d). With views, every view of every sample is an anchor.
        y: Integer labels (n,), or None if ``positive`` replaces them.
        eta: Weight of the second term, which pushes the anchor away from other classes. See :func:`parity_eta`.
        gamma: Focusing exponent of the first term.
        temperature: Divides the similarities. A tensor of one element gets its gradient.
        reference: ``(z_ref, y_ref)``, extra contrast samples that are not anchors, such as a queue. For other ranks use
            ``DistributedLoss`` or ``gather_reference``: a plain gather loses a part of the gradient.
        positive: Boolean (n, m) mask that replaces the labels: pass None for ``y`` and ``y_ref``. Its m columns are the
            samples, then the reference. An entry on the diagonal applies to the other views of the same sample.
        contrast: The contrast samples. "all" are the batch and the reference, "reference" is the reference alone. A
            boolean (n, m) mask, with the columns of ``positive``, chooses them for each anchor. A sample that is left
            out is in neither P_i nor N_i nor the softmax.
        ignore_index: The label of samples that are left out, for example because their class is unknown. They are
            neither anchors nor contrast samples, as if the batch did not hold them.
        normalization: "paper" divides by ``|P_i|`` and ``|N_i|``. "released" divides both by the number of contrast
            samples (the anchor included), like the authors' released code.
        reduction: "mean" divides the sum over anchors by their number. "sum" is the formula in the paper. "none"
            returns one value per anchor, (n,) or (n, views), which is 0 for samples of ``ignore_index``.
        tile: Rows per block of the tiled kernel, which stores nothing of size n x n. It never changes the result. None
            selects the dense path, which can be differentiated twice.

    Returns:
        A scalar, or one value per anchor. The dtype is float32 for half-precision features.

    >>> z = torch.tensor([[1.0, 0.0], [0.8, 0.6], [-1.0, 0.0]])
    >>> y = torch.tensor([0, 0, 1])
    >>> asymmetric_focal_contrastive_loss(z, y, eta=2.0, temperature=0.5, reduction="none").round(decimals=4)
    tensor([0.0809, 0.1199, 1.4260])
    """
    numbers, temperature = check_settings(eta, gamma), check_temperature(temperature)
    check_word("normalization", normalization, ("paper", "released"))
    check_word("reduction", reduction, ("mean", "sum", "none"))
    options = (*numbers, _number(temperature), False, normalization == "released")
    inputs = check_inputs(z, y, reference, positive, contrast, check_ignore_index(ignore_index), temperature)
    return _loss(z, inputs, options, reduction, tile)


def _number(temperature: float | Tensor) -> float:
    """The temperature in the options. A tensor is one of the inputs instead."""
    return 1.0 if isinstance(temperature, Tensor) else temperature


def _loss(z: Tensor, inputs: Arguments, options: _Settings, reduction: str, tile: Tile) -> Tensor:
    """Return the loss of checked arguments. Only the shape of ``z`` is used."""
    if reduction == "none":
        return _values(inputs, options, tile).reshape(z.shape[:-1])
    return _total_and_values(inputs, options, tile, mean=reduction == "mean")[0]


def _values(inputs: Arguments, options: _Settings, tile: Tile) -> Tensor:
    """The loss of each anchor, (n,), differentiable. The tiled path visits its blocks again for the gradient."""
    columns, rows, inputs = _prepare(inputs, tile)
    if columns < 3:  # every p is 1
        values = (inputs.z * 0.0).sum(1)
        values = values if inputs.temperature is None else values + inputs.temperature * 0.0
        return values if inputs.reference is None else values + (inputs.reference * 0.0).sum()
    if rows is None:
        return _dense(inputs, options)
    tiled: Tensor = TiledRows.apply(*inputs, *options, rows)
    return tiled


def _total_and_values(inputs: Arguments, options: _Settings, tile: Tile, *, mean: bool) -> tuple[Tensor, Tensor]:
    """The sum or mean over anchors, differentiable, and the loss of each, (n,), detached; one visit of the blocks."""
    columns, rows, prepared = _prepare(inputs, tile)
    if columns < 3 or rows is None:
        values = _values(inputs, options, tile)
        return values.sum() / _num_anchors(inputs) if mean else values.sum(), values.detach()
    # The factor is a number. The number of known labels is a tensor, for which the host would have to wait.
    factor = 1.0 / prepared.z.shape[0] if mean and prepared.anchors is None else 1.0
    total, values = TiledTotal.apply(*prepared, factor, *options, rows)
    return total / _num_anchors(prepared) if mean and prepared.anchors is not None else total, values


def _num_anchors(inputs: Arguments) -> int | Tensor:
    """The divisor of a mean: at least 1, so that a batch without a known label has the loss 0."""
    return inputs.z.shape[0] if inputs.anchors is None else inputs.anchors.sum().clamp(min=1)


def _prepare(inputs: Arguments, tile: Tile) -> tuple[int, int | None, Arguments]:
    """The number of contrast columns, the tile as the kernel takes it, and inputs that fit the gradient mode."""
    columns = inputs.z.shape[0] + (0 if inputs.reference is None else inputs.reference.shape[0])
    if not torch.is_grad_enabled():  # A feature that requires grad would have its gradient made for nothing.
        inputs = Arguments(*(None if x is None else x.detach() for x in inputs))  # type: ignore[arg-type]
    return columns, check_tile(tile), inputs


def _dense(inputs: Arguments, options: _Settings) -> Tensor:
    z, reference, learnt, y, y_reference, positive, contrast, anchors = inputs
    if positive is None:
        assert y is not None
        positive = y[:, None] == (y if y_reference is None else torch.cat([y, y_reference]))
    eta, gamma, number, *flags = options
    temperature = number if learnt is None else learnt
    with torch.autocast(z.device.type, enabled=False):
        return dense_values(z, reference, positive, contrast, anchors, eta, gamma, temperature, *flags)


def contrastive_loss(
    z: Tensor,
    y: Tensor | None,
    *,
    temperature: float | Tensor = 0.07,
    reference: Reference | None = None,
    positive: Tensor | None = None,
    contrast: Contrast = "all",
    ignore_index: int | None = None,
    normalization: Normalization = "paper",
    reduction: Reduction = "mean",
    tile: Tile = "auto",
) -> Tensor:
    """Supervised contrastive loss (CL), Eq. (17): :func:`asymmetric_focal_contrastive_loss` with eta = gamma = 0."""
    return asymmetric_focal_contrastive_loss(
        z, y, temperature=temperature, reference=reference, positive=positive, contrast=contrast,
        ignore_index=ignore_index, normalization=normalization, reduction=reduction, tile=tile,
    )  # fmt: skip


def focal_contrastive_loss(
    z: Tensor,
    y: Tensor | None,
    *,
    gamma: float = 1.0,
    temperature: float | Tensor = 0.07,
    reference: Reference | None = None,
    positive: Tensor | None = None,
    contrast: Contrast = "all",
    ignore_index: int | None = None,
    normalization: Normalization = "paper",
    reduction: Reduction = "mean",
    tile: Tile = "auto",
) -> Tensor:
    """Focal contrastive loss (FCL), Eq. (21): :func:`asymmetric_focal_contrastive_loss` with eta = 0, gamma = 1."""
    return asymmetric_focal_contrastive_loss(
        z, y, gamma=gamma, temperature=temperature, reference=reference, positive=positive, contrast=contrast,
        ignore_index=ignore_index, normalization=normalization, reduction=reduction, tile=tile,
    )  # fmt: skip


def asymmetric_contrastive_loss(
    z: Tensor,
    y: Tensor | None,
    *,
    eta: float = 0.0,
    temperature: float | Tensor = 0.07,
    reference: Reference | None = None,
    positive: Tensor | None = None,
    contrast: Contrast = "all",
    ignore_index: int | None = None,
    normalization: Normalization = "paper",
    reduction: Reduction = "mean",
    tile: Tile = "auto",
) -> Tensor:
    """Asymmetric contrastive loss (ACL), Eq. (24): :func:`asymmetric_focal_contrastive_loss` with gamma = 0."""
    return asymmetric_focal_contrastive_loss(
        z, y, eta=eta, temperature=temperature, reference=reference, positive=positive, contrast=contrast,
        ignore_index=ignore_index, normalization=normalization, reduction=reduction, tile=tile,
    )  # fmt: skip


class _Options(TypedDict, total=False):
    """The keywords that all modules have."""

    eta_unit: EtaUnit
    normalize: bool
    ignore_index: int | None
    normalization: Normalization
    reduction: Reduction
    tile: Tile


class AsymmetricFocalContrastiveLoss(nn.Module):
    """:func:`asymmetric_focal_contrastive_loss` as a module that normalises the features.

    ``temperature`` may be an ``nn.Parameter`` of one element, which is then a parameter of the module. A temperature
    that is computed in each step is an argument of the call.

    With ``eta_unit="parity"``, eta is multiplied by :func:`parity_eta` of the number of contrast samples. One value
    then has the same meaning at every batch size. For example, 0.5 is the paper's 300 at its batch size of 128.
    """

    def __init__(
        self,
        eta: float = 0.0,
        gamma: float = 0.0,
        temperature: float | nn.Parameter = 0.07,
        *,
        eta_unit: EtaUnit = "absolute",
        normalize: bool = True,
        ignore_index: int | None = None,
        normalization: Normalization = "paper",
        reduction: Reduction = "mean",
        tile: Tile = "auto",
    ) -> None:
        super().__init__()
        self.eta, self.gamma = check_settings(eta, gamma)
        self.temperature = _own_temperature(temperature)
        self.eta_unit = check_word("eta_unit", eta_unit, ("absolute", "parity"))
        self.normalize = normalize
        self.ignore_index = check_ignore_index(ignore_index)
        self.normalization = check_word("normalization", normalization, ("paper", "released"))
        self.reduction = check_word("reduction", reduction, ("mean", "sum", "none"))
        check_tile(tile)
        self.tile = tile

    def forward(
        self,
        z: Tensor,
        y: Tensor | None = None,
        *,
        reference: Reference | None = None,
        positive: Tensor | None = None,
        contrast: Contrast = "all",
        temperature: float | Tensor | None = None,
    ) -> Tensor:
        """The loss of features ``z`` with labels ``y``. ``temperature`` replaces the one of the module in this call."""
        inputs, options = self._arguments(z, y, reference, positive, contrast, temperature)
        return _loss(z, inputs, options, self.reduction, self.tile)

    def total_and_values(
        self,
        z: Tensor,
        y: Tensor | None = None,
        *,
        reference: Reference | None = None,
        positive: Tensor | None = None,
        contrast: Contrast = "all",
        temperature: float | Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The sum over all anchors, to differentiate, and the loss of each, detached, whatever ``reduction`` says.

        This is for training: values and gradient come from one visit of the blocks, where ``reduction="none"`` needs a
        second one for its gradient. The values have the shape of ``z`` without its last dimension.
        """
        inputs, options = self._arguments(z, y, reference, positive, contrast, temperature)
        total, values = _total_and_values(inputs, options, self.tile, mean=False)
        return total, values.reshape(z.shape[:-1])

    def _arguments(
        self,
        z: Tensor,
        y: Tensor | None,
        reference: Reference | None,
        positive: Tensor | None,
        contrast: Contrast,
        temperature: float | Tensor | None,
    ) -> tuple[Arguments, _Settings]:
        if self.normalize:
            z, reference = _unit(z), _unit_reference(reference)
        parity, released = self.eta_unit == "parity", self.normalization == "released"
        temperature = check_temperature(self.temperature if temperature is None else temperature)
        options = self.eta, self.gamma, _number(temperature), parity, released
        return check_inputs(z, y, reference, positive, contrast, self.ignore_index, temperature), options

    def extra_repr(self) -> str:
        """Return the settings for ``repr``."""
        names = ["eta", "gamma", "temperature", "eta_unit", "normalize", "normalization", "reduction", "tile"]
        names += [] if self.ignore_index is None else ["ignore_index"]
        shown = {name: repr(getattr(self, name)) for name in names}
        if isinstance(self.temperature, Tensor):
            shown["temperature"] = f"Parameter({self.temperature.item():.4g})"
        return ", ".join(f"{name}={text}" for name, text in shown.items())


def _own_temperature(temperature: float | Tensor) -> float | Tensor:
    """The temperature of a module: a number or a parameter."""
    if not isinstance(temperature, nn.Parameter) and isinstance(temperature, Tensor) and temperature.requires_grad:
        do = "Pass it with each call: criterion(z, y, temperature=...)."
        raise TypeError(f"temperature must be a number or an nn.Parameter, got a tensor that requires grad. {do}")
    checked = check_temperature(temperature)
    is_number = isinstance(checked, float) or isinstance(temperature, nn.Parameter)
    return checked if is_number else float(checked)


class ContrastiveLoss(AsymmetricFocalContrastiveLoss):
    """:func:`contrastive_loss` as a module that normalises the features."""

    def __init__(self, temperature: float | nn.Parameter = 0.07, **options: Unpack[_Options]) -> None:
        _check_options(type(self).__name__, options)
        super().__init__(0.0, 0.0, temperature, **options)


SupConLoss = ContrastiveLoss
"""The name of the loss in Khosla et al., 2020, and in other libraries."""


class FocalContrastiveLoss(AsymmetricFocalContrastiveLoss):
    """:func:`focal_contrastive_loss` as a module that normalises the features."""

    def __init__(
        self, gamma: float = 1.0, temperature: float | nn.Parameter = 0.07, **options: Unpack[_Options]
    ) -> None:
        _check_options(type(self).__name__, options)
        super().__init__(0.0, gamma, temperature, **options)


class AsymmetricContrastiveLoss(AsymmetricFocalContrastiveLoss):
    """:func:`asymmetric_contrastive_loss` as a module that normalises the features."""

    def __init__(self, eta: float = 0.0, temperature: float | nn.Parameter = 0.07, **options: Unpack[_Options]) -> None:
        _check_options(type(self).__name__, options)
        super().__init__(eta, 0.0, temperature, **options)


def _check_options(module: str, options: _Options) -> None:
    """Refuse a keyword that a module does not have, with the module's own name."""
    for name in options:
        if name not in _Options.__annotations__:
            do = " Use AsymmetricFocalContrastiveLoss, which has eta and gamma." if name in ("eta", "gamma") else ""
            raise TypeError(f"{module}() got an unexpected keyword argument {name!r}.{do}")


class ContrastiveObjective(AnchorObjective):
    """CL, FCL, ACL and AFCL in training: the mean over anchors of :func:`asymmetric_focal_contrastive_loss`."""

    def __init__(
        self,
        counts: Tensor,
        width: int,
        *,
        eta: float = 0.0,
        eta_unit: EtaUnit = "absolute",
        gamma: float = 0.0,
        temperature: float = 0.07,
        normalization: Normalization = "paper",
    ) -> None:
        super().__init__(counts, width)
        self.loss = AsymmetricFocalContrastiveLoss(
            eta, gamma, temperature, eta_unit=eta_unit, normalization=normalization
        )

    def apart(self, samples: Samples) -> Tensor:
        """Return each sample's part of the loss with its graph, which takes a second visit of the blocks."""
        assert samples.projections is not None
        inputs, options = self.loss._arguments(samples.projections, samples.y, samples.reference, None, "all", None)
        values = _values(inputs, options, self.loss.tile).reshape(len(samples.y), -1)
        return values.mean(dim=1) / len(samples.whole)


def _unit_reference(reference: Reference | None) -> Reference | None:
    """Return a reference with features of length 1. What is no pair stays as it is: its check raises the error."""
    if isinstance(reference, (tuple, list)) and len(reference) == 2:
        return _unit(reference[0]), reference[1]
    return reference


def _unit(z: Tensor) -> Tensor:
    """Return features of length 1, in float32 or wider, because half precision would round the length.

    Each row is first divided by its largest entry, so that no length overflows or underflows. A row of zeros stays
    zero and gets gradient zero. ``normalize`` would multiply its gradient by 1e12, which is infinite in half precision.
    """
    if not isinstance(z, Tensor) or not z.is_floating_point():
        return z  # check_inputs raises the error
    z = z.to(torch.promote_types(z.dtype, torch.float32))
    if z.shape[-1] == 0:
        return z
    largest = z.detach().abs().amax(-1, keepdim=True)
    unit = nn.functional.normalize(z / torch.where(largest > 0, largest, 1.0), dim=-1)
    return torch.where(largest == 0, 0.0, unit)
