"""What the contrastive losses ask of their arguments, each refusal in one sentence."""

from __future__ import annotations

import math
import numbers
from typing import NamedTuple

import torch
from torch import Tensor

Reference = tuple[Tensor, Tensor | None]


class Arguments(NamedTuple):
    """Arguments in the form that both paths take: anchors flat, in the precision of the computation."""

    z: Tensor
    reference: Tensor | None
    temperature: Tensor | None
    """The temperature if it is a tensor, which may require a gradient."""
    y: Tensor | None
    y_reference: Tensor | None
    positive: Tensor | None
    contrast: Tensor | None
    """(n, m), or (1, m) if it is the same for all anchors; None if no sample is left out."""
    anchors: Tensor | None
    """(n,), False for samples without a known label; None if all samples are anchors."""


def check_number(name: str, value: object, *, advice: str, above_zero: bool = False) -> float:
    """A finite number, >= 0 or > 0."""
    if isinstance(value, Tensor):
        if value.requires_grad:
            raise TypeError(f"{name} must be a number, got a tensor that requires grad. Pass a float.")
        _check_one_number(name, value)
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}. Pass a float.")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not 0 <= number < math.inf or (above_zero and number == 0):
        bound = "> 0" if above_zero else ">= 0"
        raise ValueError(f"{name} must be {bound} and finite, got {number}. {advice}".rstrip())
    return number


def _check_one_number(name: str, value: Tensor) -> None:
    if value.numel() != 1 or value.is_complex():
        got = f"a tensor of shape {tuple(value.shape)} and type {value.dtype}"
        raise TypeError(f"{name} must be a number, got {got}. Pass a float.")


def check_temperature(value: object) -> float | Tensor:
    """A number > 0, or a floating tensor of one element, which may require a gradient.

    The content of a tensor is checked where reading it costs nothing: on the CPU, outside of torch.compile and vmap.
    """
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return check_number("temperature", value, above_zero=True, advice="The paper uses 0.07.")
    _check_one_number("temperature", value)
    if value.device.type == "cpu" and not torch.compiler.is_compiling():
        try:
            number = value.item()
        except RuntimeError:  # vmap, and tensors without content
            return value
        advice = "To keep it positive, learn its logarithm and pass the exponential."
        check_number("temperature", number, above_zero=True, advice=advice)
    return value


def check_settings(eta: object, gamma: object) -> tuple[float, float]:
    """The two numbers of the loss that are never learnt."""
    return (
        check_number("eta", eta, advice="Use 0 for the symmetric loss."),
        check_number("gamma", gamma, advice="Use 0 for the loss without focusing."),
    )


def check_ignore_index(value: object) -> int | None:
    """The label of samples to leave out, or None."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        got = type(value).__name__
        raise TypeError(f"ignore_index must be None or the label of samples to leave out, got {got}. Pass an int.")
    return int(value)


def check_word(name: str, value: object, words: tuple[str, ...]) -> str:
    """One of a few words."""
    if not isinstance(value, str) or value not in words:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, words))}, got {value!r}.")
    return value


def check_tile(tile: object) -> int | None:
    """Rows per block, 0 for the number that the kernel chooses, or None for the dense path."""
    if tile is None:
        return None
    if isinstance(tile, str) and tile == "auto":
        return 0
    if isinstance(tile, bool) or not isinstance(tile, numbers.Integral) or tile < 1:
        raise ValueError(f"tile must be 'auto', None or an int >= 1, got {tile!r}. It is the number of rows per block.")
    return int(tile)


def check_inputs(
    z: Tensor,
    y: Tensor | None,
    reference: Reference | None,
    positive: Tensor | None,
    contrast: Tensor | str,
    ignore_index: int | None,
    temperature: float | Tensor,
) -> Arguments:
    """Shapes, types and devices; views are unfolded, and half precision becomes float32."""
    _check_features("z", z)
    n, views = len(z), z.shape[1] if z.ndim == 3 else 1
    if n == 0 or views == 0:
        raise ValueError(f"z must hold at least one sample, got shape {tuple(z.shape)}.")
    _check_labels_or_mask(y, positive, ignore_index)
    y = None if y is None else _check_labels("y", y, n, z)
    z_ref = y_ref = None
    ref_rows, ref_views = 0, 1
    if reference is not None:
        z_ref, y_ref = _check_reference(reference, z, positive)
        ref_rows, ref_views = len(z_ref), z_ref.shape[1] if z_ref.ndim == 3 else 1
        z_ref = z_ref.reshape(ref_rows * ref_views, z.shape[-1])
        y_ref = y_ref.repeat_interleave(ref_views) if y_ref is not None and ref_views > 1 else y_ref
    y = y.repeat_interleave(views) if y is not None and views > 1 else y
    sizes = n, views, ref_rows, ref_views
    if positive is not None:
        positive = _unfold(_check_mask("positive", positive, n, n + ref_rows, z), *sizes)
    mask = _contrast_mask(contrast, reference is not None, sizes, z)
    anchors = None
    if ignore_index is not None and y is not None:
        anchors = y != ignore_index
        known = anchors if y_ref is None else torch.cat([anchors, y_ref != ignore_index])
        mask = known.unsqueeze(0) if mask is None else mask & known
    dtype = torch.promote_types(z.dtype if z_ref is None else torch.promote_types(z.dtype, z_ref.dtype), torch.float32)
    z = (z if z.ndim == 2 else z.reshape(n * views, z.shape[-1])).to(dtype)
    learnt = temperature.to(z.device, dtype).reshape(()) if isinstance(temperature, Tensor) else None
    z_ref = None if z_ref is None or not len(z_ref) else z_ref.to(dtype)
    return Arguments(z, z_ref, learnt, y, y_ref, positive, mask, anchors)


def _check_labels_or_mask(y: Tensor | None, positive: Tensor | None, ignore_index: int | None) -> None:
    if y is None and positive is None:
        raise ValueError("y must hold one label per sample, got None. Pass labels, or a positive mask in their place.")
    if y is not None and positive is not None:
        raise ValueError("y and positive cannot be used together, because positive replaces the labels. Pass y=None.")
    if positive is not None and ignore_index is not None:
        raise ValueError("ignore_index needs labels, got a positive mask. Leave samples out with contrast.")


def _contrast_mask(
    contrast: Tensor | str, has_reference: bool, sizes: tuple[int, int, int, int], z: Tensor
) -> Tensor | None:
    """None for all samples, (1, m) for the reference alone, or the caller's mask, unfolded."""
    n, views, ref_rows, ref_views = sizes
    if isinstance(contrast, Tensor):
        return _unfold(_check_mask("contrast", contrast, n, n + ref_rows, z), *sizes)
    if not isinstance(contrast, str) or contrast not in ("all", "reference"):
        raise ValueError(f"contrast must be 'all', 'reference' or a boolean mask, got {contrast!r}.")
    if contrast == "all":
        return None
    if not has_reference:
        raise ValueError("contrast='reference' needs a reference, got None. Pass reference=(z_ref, y_ref).")
    return (torch.arange(n * views + ref_rows * ref_views, device=z.device) >= n * views).unsqueeze(0)


def _unfold(mask: Tensor, n: int, views: int, ref_rows: int, ref_views: int) -> Tensor:
    """Repeat the entry of a sample for each of its views."""
    if views <= 1 and ref_views <= 1:
        return mask
    times = torch.where(torch.arange(n + ref_rows, device=mask.device) < n, views, ref_views)
    columns = n * views + ref_rows * ref_views  # Without it, the host would wait for the sum of ``times``.
    return mask.repeat_interleave(views, 0).repeat_interleave(times, 1, output_size=columns)


def _check_features(name: str, z: object) -> None:
    if not isinstance(z, Tensor):
        raise TypeError(f"{name} must be a tensor of features, got {type(z).__name__}. Wrap it in torch.as_tensor.")
    if not z.is_floating_point():
        raise TypeError(f"{name} must be a floating tensor, got {z.dtype}. Convert it with {name}.float().")
    if z.ndim not in (2, 3):
        raise ValueError(f"{name} must have shape (n, d) or (n, views, d), got {tuple(z.shape)}.")


def _check_labels(name: str, y: object, n: int, z: Tensor) -> Tensor:
    if not isinstance(y, Tensor):
        raise TypeError(f"{name} must be a tensor of labels, got {type(y).__name__}. Wrap it in torch.as_tensor.")
    if y.is_floating_point() or y.is_complex():
        raise TypeError(f"{name} must be an integer or boolean tensor, got {y.dtype}. Convert it with {name}.long().")
    if y.shape != (n,):
        raise ValueError(f"{name} must have shape ({n},), one label per sample, got {tuple(y.shape)}.")
    _check_device(name, y, z)
    return y.long()


def _check_device(name: str, tensor: Tensor, z: Tensor) -> None:
    if tensor.device != z.device:
        raise ValueError(f"{name} must be on the device of z, {z.device}, got {tensor.device}.")


def _check_reference(reference: object, z: Tensor, positive: Tensor | None) -> tuple[Tensor, Tensor | None]:
    if not isinstance(reference, (tuple, list)) or len(reference) != 2:
        length = f" of length {len(reference)}" if isinstance(reference, (tuple, list)) else ""
        raise TypeError(f"reference must be a pair (z_ref, y_ref), got {type(reference).__name__}{length}.")
    z_ref, y_ref = reference
    _check_features("z_ref", z_ref)
    if z_ref.shape[-1] != z.shape[-1]:
        raise ValueError(f"z_ref must have the {z.shape[-1]} features of z, got {z_ref.shape[-1]}.")
    _check_device("z_ref", z_ref, z)
    if y_ref is not None and positive is not None:
        text = "y_ref and positive cannot be used together, because positive replaces the labels."
        raise ValueError(f"{text} Pass reference=(z_ref, None).")
    if y_ref is None and positive is None:
        raise ValueError("y_ref must hold one label per reference sample, got None. Pass labels, or a positive mask.")
    return z_ref, None if y_ref is None else _check_labels("y_ref", y_ref, len(z_ref), z)


def _check_mask(name: str, mask: object, n: int, m: int, z: Tensor) -> Tensor:
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        kind = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(f"{name} must be a boolean tensor, got {kind}. Compare it with 0 to make a mask.")
    if mask.shape != (n, m):
        got = tuple(mask.shape)
        raise ValueError(f"{name} must have shape ({n}, {m}), samples by contrast samples, got {got}.")
    _check_device(name, mask, z)
    return mask
