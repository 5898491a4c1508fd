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
    y: Tensor | None
    y_reference: Tensor | None
    positive: Tensor | None


def check_number(name: str, value: object, *, advice: str, above_zero: bool = False) -> float:
    """A finite number, >= 0 or > 0."""
    if isinstance(value, Tensor):
        if value.requires_grad:
            hint = (
                "To learn it, multiply z by temperature ** -0.5 and pass temperature=1."
                if name == "temperature"
                else "Pass a float."
            )
            raise TypeError(f"{name} must be a number, got a tensor that requires grad. {hint}")
        if value.numel() != 1 or value.is_complex():
            got = f"a tensor of shape {tuple(value.shape)} and type {value.dtype}"
            raise TypeError(f"{name} must be a number, got {got}. Pass a float.")
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


def check_settings(eta: object, gamma: object, temperature: object) -> tuple[float, float, float]:
    """The three numbers of the loss."""
    return (
        check_number("eta", eta, advice="Use 0 for the symmetric loss."),
        check_number("gamma", gamma, advice="Use 0 for the loss without focusing."),
        check_number("temperature", temperature, above_zero=True, advice="The paper uses 0.07."),
    )


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


def check_inputs(z: Tensor, y: Tensor | None, reference: Reference | None, positive: Tensor | None) -> Arguments:
    """Shapes, types and devices; views are unfolded, and half precision becomes float32."""
    _check_features("z", z)
    n, views = len(z), z.shape[1] if z.ndim == 3 else 1
    if n == 0 or views == 0:
        raise ValueError(f"z must hold at least one sample, got shape {tuple(z.shape)}.")
    if y is None and positive is None:
        raise ValueError("y must hold one label per sample, got None. Pass labels, or a positive mask in their place.")
    y = None if y is None else _check_labels("y", y, n, z)
    z_ref = y_ref = None
    ref_rows, ref_views = 0, 1
    if reference is not None:
        z_ref, y_ref = _check_reference(reference, z, positive)
        ref_rows, ref_views = len(z_ref), z_ref.shape[1] if z_ref.ndim == 3 else 1
        z_ref = z_ref.reshape(ref_rows * ref_views, z.shape[-1])
        y_ref = y_ref.repeat_interleave(ref_views) if y_ref is not None and ref_views > 1 else y_ref
    if positive is not None:
        positive = _check_mask(positive, n, n + ref_rows, z)
        if views > 1 or ref_views > 1:
            times = torch.where(torch.arange(n + ref_rows, device=z.device) < n, views, ref_views)
            columns = n * views + ref_rows * ref_views  # Without it, the host would wait for the sum of ``times``.
            positive = positive.repeat_interleave(views, 0).repeat_interleave(times, 1, output_size=columns)
        y = y_ref = None
    dtype = torch.promote_types(z.dtype if z_ref is None else torch.promote_types(z.dtype, z_ref.dtype), torch.float32)
    z = (z if z.ndim == 2 else z.reshape(n * views, z.shape[-1])).to(dtype)
    y = y.repeat_interleave(views) if y is not None and views > 1 else y
    return Arguments(z, None if z_ref is None or not len(z_ref) else z_ref.to(dtype), y, y_ref, positive)


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
    if y_ref is None and positive is None:
        raise ValueError("y_ref must hold one label per reference sample, got None. Pass labels, or a positive mask.")
    return z_ref, None if y_ref is None else _check_labels("y_ref", y_ref, len(z_ref), z)


def _check_mask(positive: object, n: int, m: int, z: Tensor) -> Tensor:
    if not isinstance(positive, Tensor) or positive.dtype != torch.bool:
        kind = positive.dtype if isinstance(positive, Tensor) else type(positive).__name__
        raise TypeError(f"positive must be a boolean tensor, got {kind}. Compare it with 0 to make a mask.")
    if positive.shape != (n, m):
        got = tuple(positive.shape)
        raise ValueError(f"positive must have shape ({n}, {m}), samples by contrast samples, got {got}.")
    _check_device("positive", positive, z)
    return positive
