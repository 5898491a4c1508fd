"""The trained model, and its two files: weights as safetensors, everything else as JSON."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor, nn

from lopsided import __version__
from lopsided.errors import LopsidedError, RunError, sentence
from lopsided.files import atomic_write, check_regular, make_folder, reading_tensors
from lopsided.models.encoders import build_encoder, is_mlp
from lopsided.models.heads import ClassifierHead
from lopsided.models.machine import arrange
from lopsided.recipe import MAX_SIDE

FORMAT = 1
CARD_NAME, WEIGHTS_NAME = "model.json", "model.safetensors"
_MAX_CARD_BYTES = 100_000_000
_LEAST = 1e-30
"""The smallest number by which pixels may be divided: in float32, all below would be infinite."""


class ModelCard(BaseModel):
    """What a program must know to use the weights: the content of ``model.json``.

    Inputs are images in [0, 1], (b, channels, h, w) with (channels, h, w) = ``shape``, or vectors (b, d) with (d,) =
    ``shape``; the model itself subtracts ``mean`` and divides by ``std``, one number per channel or per column.
    ``image_size`` is the side to which images are resized; None where they are not square and come as they are.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    format: Literal[1] = 1
    lopsided: str = __version__
    kind: Literal["image", "vector"]
    encoder: str
    encoder_weights: str = "none"
    channels: int
    image_size: int | None
    shape: tuple[int, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    classes: tuple[str, ...] = Field(min_length=2)
    features: int
    sha256: str = ""
    """Of the file of weights, so that two files which do not belong together are noticed."""


class Model(nn.Module):
    """Encoder and linear classifier; inputs are normalised inside, vectors in double precision."""

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        encoder: nn.Module,
        classifier: ClassifierHead,
        mean: Sequence[float],
        std: Sequence[float],
        kind: Literal["image", "vector"] = "image",
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self.classifier = classifier
        # They stand in the card, so they are no part of the weights.
        dtype, shape = (torch.float32, (1, -1, 1, 1)) if kind == "image" else (torch.float64, (1, -1))
        self.register_buffer("mean", torch.tensor(mean, dtype=dtype).view(shape), persistent=False)
        self.register_buffer("std", torch.tensor(std, dtype=dtype).view(shape), persistent=False)

    def features(self, x: Tensor) -> Tensor:
        """Feature vectors (n, f) of inputs (n, c, h, w) in [0, 1], or (n, d)."""
        features: Tensor = self.encoder(((x - self.mean) / self.std).float())
        return features

    def forward(self, x: Tensor) -> Tensor:
        """Logits (n, K)."""
        logits: Tensor = self.classifier(self.features(x))
        return logits


def _build(card: ModelCard) -> Model:
    """Build the model that a card describes, with weights that are to be replaced."""
    vector = card.kind == "vector"
    encoder, features = build_encoder(
        card.encoder,
        channels=card.channels,
        image_size=None if vector else (card.shape[1], card.shape[2]),
        in_features=card.shape[0] if vector else None,
    )
    return Model(encoder, ClassifierHead(features, len(card.classes)), card.mean, card.std, card.kind)


def save_model(folder: Path, model: Model, card: ModelCard) -> ModelCard:
    """Write ``model.safetensors`` and then ``model.json``, which counts only with the weights it was written for."""
    from safetensors.torch import save

    make_folder(folder)
    state = {key: value.detach().cpu().contiguous() for key, value in model.state_dict().items()}
    content = save(state, metadata={"format": "pt"})
    card = card.model_copy(update={"sha256": hashlib.sha256(content).hexdigest()})
    atomic_write(folder / WEIGHTS_NAME, content)
    atomic_write(folder / CARD_NAME, card.model_dump_json(indent=2) + "\n")
    return card


def load_model(folder: str | Path, device: str | torch.device = "cpu", *, fast: bool = True) -> tuple[Model, ModelCard]:
    """Read a model in eval mode; anything that does not fit is one sentence.

    With ``fast`` its encoder takes the paths and layouts of a training with ``fast``, whose numbers it then gives.
    """
    from safetensors.torch import load

    folder = Path(folder)
    card = load_card(folder)
    path = folder / WEIGHTS_NAME
    try:
        check_regular(path)
        content = path.read_bytes()
    except OSError as error:
        raise RunError(sentence(f"{path} must be readable", error.strerror, "Train the model again.")) from error
    if hashlib.sha256(content).hexdigest() != card.sha256:
        must = f"{path} must be the weights that {CARD_NAME} was written for"
        raise RunError(sentence(must, "a changed or truncated file"))
    try:
        with reading_tensors():
            state = load(content)
    except ValueError as error:
        raise RunError(sentence(f"{path} must be a safetensors file", error)) from error
    _check_numbers(state, path)
    _check_head(state, card, path)
    try:
        if is_mlp(card.encoder):  # Its size is whatever the card says, so that it is compared before it is made.
            with torch.device("meta"):
                _check_shapes(_build(card), state, card, path)
        model = _build(card)
        _check_shapes(model, state, card, path)
    except RunError:
        raise
    except LopsidedError as error:
        raise RunError(f"{folder / CARD_NAME} must describe a model that can be built: {error}") from error
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        got = " ".join(str(error).splitlines()[1].split()).rstrip(".") if "\n" in str(error) else str(error)
        raise RunError(sentence(f"{path} must fit the encoder {card.encoder}", got)) from error
    if fast and card.shape == (card.channels, card.image_size, card.image_size):  # as the encoder was just tried with
        arrange(model.encoder, torch.device(device), card.shape)
    return model.to(device).eval(), card


def _check_numbers(state: Mapping[str, Tensor], path: Path) -> None:
    """Refuse weights that are no finite real numbers: all that they answer would be nonsense."""
    odd = [key for key, value in state.items() if value.is_complex() or value.is_quantized]
    if odd or not all_finite(value.float() for value in state.values() if value.is_floating_point()):
        got = f"complex ones in {odd[0]}" if odd else "NaN or infinite ones"
        raise RunError(sentence(f"{path} must hold finite numbers", got, "Train the model again."))


def _check_head(state: Mapping[str, Tensor], card: ModelCard, path: Path) -> None:
    """Refuse a classifier of another number of classes before one of the card's number is made, which may be huge."""
    weight = state.get("classifier.weight")
    if weight is None or weight.shape[:1] != (len(card.classes),):
        got = "none" if weight is None else f"one of shape {tuple(weight.shape)}"
        raise RunError(sentence(f"{path} must hold a classifier of the {len(card.classes):,} classes of the card", got))


def _check_shapes(model: Model, state: Mapping[str, Tensor], card: ModelCard, path: Path) -> None:
    """Raise for weights of another shape or kind of number; those that are missing are told when they are loaded."""
    for key, value in model.state_dict().items():
        if key in state and (state[key].shape != value.shape or state[key].dtype != value.dtype):
            there, needed = (f"{t.dtype} of shape {tuple(t.shape)}" for t in (state[key], value))
            got = f"{key}, {there}, where {needed} is needed"
            raise RunError(sentence(f"{path} must fit the encoder {card.encoder:.80}", got))


def load_card(folder: Path) -> ModelCard:
    """Read ``model.json`` alone."""
    import json

    path = folder / CARD_NAME
    do = "Give the folder that a finished run was written to."
    if not path.is_file():
        raise RunError(sentence(f"a run folder must hold {CARD_NAME}", f"none in {folder}", do))
    try:
        with path.open("rb") as file:
            content = json.loads(file.read(_MAX_CARD_BYTES))
    except OSError as error:
        raise RunError(sentence(f"{path} must be readable", error.strerror)) from error
    except (ValueError, RecursionError) as error:
        raise RunError(sentence(f"{path} must be JSON", "other text", do)) from error
    version = content.get("format") if isinstance(content, dict) else None
    if version != FORMAT:
        wrote = content.get("lopsided") if isinstance(content, dict) else None
        do = f"It was written by lopsided {wrote}; use that version." if isinstance(wrote, str) else do
        raise RunError(sentence(f"{path} must be of format {FORMAT}", f"{version!r:.100}", do))
    try:
        card = ModelCard.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        got = f"{'.'.join(map(str, first['loc']))}: {first['msg'][:1].lower()}{first['msg'][1:]}"
        raise RunError(sentence(f"{path} must hold the fields of a model card", got)) from error
    _check_card(card, path)
    return card


def _check_card(card: ModelCard, path: Path) -> None:
    vector = card.kind == "vector"
    dims, numbers = (1, card.shape[0]) if vector and card.shape else (3, card.channels)
    wrong = len(card.shape) != dims or min(card.shape) < 1 or not len(card.mean) == len(card.std) == numbers
    if not wrong and not vector:
        side = card.image_size
        wrong = card.channels not in (1, 3) or card.shape[0] != card.channels or max(card.shape) > MAX_SIDE
        wrong = wrong or (side is not None and card.shape[1:] != (side, side))
        wrong = wrong or not all(_LEAST < value < 1 / _LEAST for value in card.std)
        wrong = wrong or not all(abs(value) < 1 / _LEAST for value in card.mean)
    if wrong or min(card.std) <= 0:
        got = f"shape {card.shape!s:.80}, {len(card.mean)} means and {len(card.std)} deviations"
        raise RunError(
            sentence(
                f"{path} must describe the inputs of a model of kind {card.kind}", f"{got} for {card.channels} channels"
            )
        )
    try:
        "".join(card.classes).encode("utf-8", "surrogateescape")  # A folder's name need not be UTF-8.
    except UnicodeEncodeError:
        raise RunError(sentence(f"{path} must name classes in Unicode", "half of a pair of surrogates")) from None
    if len(set(card.classes)) < len(card.classes):
        raise RunError(sentence(f"{path} must name each class once", f"{len(card.classes)} names, some of them twice"))


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether no weight is NaN or infinite."""
    values = [value.detach() for value in tensors if value.is_floating_point() and value.numel()]
    # The largest absolute value, in one pass over the memory: it is NaN where a weight is.
    return not values or bool(torch.stack([*torch._foreach_norm(values, math.inf)]).isfinite().all())
