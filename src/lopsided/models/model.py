"""The trained model, averages of models, and the two files: the weights as safetensors, the rest as JSON."""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor, nn

from lopsided import __version__
from lopsided.errors import InputError, LopsidedError, RunError, sentence
from lopsided.evaluation.decision import PLAIN as MOST_PROBABLE
from lopsided.evaluation.decision import Decision
from lopsided.files import atomic_write, check_regular, make_folder, reading_tensors
from lopsided.models.blocks.block import Layout
from lopsided.models.blocks.columns import TableColumn, width_of
from lopsided.models.encoders import Ensemble, LateEncoder, build_encoder, embedded_encoder, late_encoder
from lopsided.models.heads import Adapter, ClassifierHead, Distance, DistanceShape, adapter_width, build_head
from lopsided.models.machine import arrange
from lopsided.models.pretrained import EMBEDDED
from lopsided.recipe import MAX_MEMBERS, MAX_SIDE
from lopsided.recipe.encoder_spec import EncoderSpec, Scaling
from lopsided.recipe.views import PLAIN, VIEWS, check_views

FORMAT = 2
"""Format 1 had no prior and no decision: such a model decides for the most probable class."""
CARD_NAME, WEIGHTS_NAME = "model.json", "model.safetensors"
_MAX_CARD_BYTES = 100_000_000
_LEAST = 1e-30
"""The smallest allowed ``std``. Division by a smaller number could overflow float32."""


class AdapterCard(BaseModel):
    """The shape of the heads between the encoder and the classifier."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    heads: int = Field(ge=1, le=64)
    hidden: int = Field(ge=1, le=2**16)
    out: int = Field(ge=1, le=2**16)
    keep: bool
    """Whether the classifier also gets the features of the encoder, in front of the outputs of the heads."""


class ModelCard(BaseModel):
    """The content of ``model.json``: everything a program needs to use the weights.

    Inputs are images in [0, 1], (b, channels, h, w) with (channels, h, w) = ``shape``, or vectors (b, d) with (d,) =
    ``shape``. The model itself subtracts ``mean`` and divides by ``std``, one number per channel or per column.
    ``image_size`` is the side to which images are resized, with this ``interpolation``. It is None if the images are
    not square and not resized.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    format: Literal[2] = 2
    lopsided: str = __version__
    kind: Literal["image", "vector"]
    encoder: str
    encoder_weights: str = "none"
    channels: int
    image_size: int | None
    shape: tuple[int, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: Literal["bilinear"] = "bilinear"
    classes: tuple[str, ...] = Field(min_length=2)
    columns: tuple[str, ...] = ()
    """The names of the columns of a vector, if its table has names."""
    beside: tuple[TableColumn, ...] = ()
    """Columns of a table beside each image. Their features follow those of the encoder, as they are."""
    features: int
    """The number of features of the encoder."""
    head: Literal["linear", "cosine", "distance"] = "linear"
    """The classifier: one linear layer, scaled cosines of features and class weights plus a bias, or one linear layer
    with the distance from the frequent class as a further column."""
    distances: tuple[DistanceShape, ...] = ()
    """The shapes of the distances that make the column."""
    scaling: Scaling = "none"
    """How the features are scaled before the heads and the classifier get them."""
    adapter: AdapterCard | None = None
    """The heads between the encoder and the classifier; None: the classifier gets the features of the encoder."""
    members: int = Field(default=1, ge=1, le=MAX_MEMBERS)
    """The number of encoders. An ensemble normalises the inputs of each member itself, after ``mean`` and ``std``."""
    views: tuple[str, ...] = PLAIN
    """The views of an image whose features are averaged (``lopsided.recipe.views``)."""
    prior: tuple[float, ...]
    """The class shares that the probabilities carry: the shares in the training batches, corrected by the weights of
    the loss."""
    temperature: float = Field(default=1.0, gt=0)
    """The temperature by which calibration divided the logits. The weights of the classifier contain it."""
    bias: tuple[float, ...] | None = None
    """The bias per class that calibration added to the logits. The bias of the classifier contains it."""
    calibrated_on: int = Field(default=0, ge=0)
    """The number of validation images that calibration is fitted to; 0: the probabilities are not calibrated."""
    decision: Decision = Decision()
    """How the model decides for a class."""
    familiar: str = ""
    """SHA-256 of the bank of known images (``inference.familiar``). Empty: it recognises no unfamiliar images."""
    sha256: str = ""
    """SHA-256 of the weights file. It detects a card and a weights file that do not belong together."""

    @property
    def spec(self) -> EncoderSpec:
        """The encoder, taken apart."""
        return EncoderSpec.parse(self.encoder, self.encoder_weights)

    @property
    def scores_distance(self) -> bool:
        """Whether an image that is unlike those of the frequent class is likely to be of another class."""
        return self.head == "distance"

    @property
    def whole_features(self) -> int:
        """The number of features of the encoder that are about the whole image."""
        return self.features - sum(each.positions * each.columns for each in self.distances if each.positions > 1)

    @property
    def num_beside(self) -> int:
        """The number of features of columns of a table."""
        return width_of(self.beside)

    @property
    def width(self) -> int:
        """The number of inputs of the classifier."""
        heads, features = self.adapter, self.features + self.num_beside
        if heads is None:
            return features
        return adapter_width(features, heads=heads.heads, out=heads.out, keep=heads.keep)


class Model(nn.Module):
    """Encoder, heads (optional) and classifier. The model normalises inputs, vectors in double precision.

    The features of an image are the mean of the encoder's features over ``views`` of the image. The classifier is
    linear, unless the loss needs another one, so its logits are then the mean of the logits of the views. Training
    uses one augmented view at a time, through ``encode``.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        encoder: nn.Module,
        classifier: ClassifierHead,
        mean: Sequence[float],
        std: Sequence[float],
        kind: Literal["image", "vector"] = "image",
        adapter: Adapter | None = None,
        views: Sequence[str] = PLAIN,
        scaling: Scaling = "none",
        members: int = 1,
    ) -> None:
        super().__init__()
        self.scaling: Scaling = scaling
        self.members = members
        self.views = tuple(views)
        self.encoder = encoder
        self.adapter = adapter
        self.classifier = classifier
        # The card holds mean and std, so they are not part of the weights.
        dtype, shape = (torch.float32, (1, -1, 1, 1)) if kind == "image" else (torch.float64, (1, -1))
        self.register_buffer("mean", torch.tensor(mean, dtype=dtype).view(shape), persistent=False)
        self.register_buffer("std", torch.tensor(std, dtype=dtype).view(shape), persistent=False)

    @property
    def is_complete(self) -> bool:
        """Whether the layers of the encoder are made."""
        return not isinstance(self.encoder, LateEncoder)

    @property
    def layout(self) -> Layout | None:
        """The columns of the features, of each member of an ensemble; None: those of one final layer."""
        one = self.encoder.members[0] if self.members > 1 and isinstance(self.encoder, Ensemble) else self.encoder
        return one.layout if isinstance(one, Ensemble | LateEncoder) else None

    @property
    def local(self) -> npt.NDArray[np.int64]:
        """The places of the columns that are about one position each, among the features of all members."""
        layout = self.layout
        if layout is None:
            return np.empty(0, dtype=np.int64)
        return np.concatenate([layout.local + member * layout.width for member in range(self.members)])

    def complete(self) -> None:
        """Make the layers of the encoder, if they are not made yet."""
        if isinstance(self.encoder, LateEncoder):
            self.encoder = self.encoder.made()

    def encode(self, x: Tensor) -> Tensor:
        """Return the features of the encoder, (n, f), of inputs (n, c, h, w) in [0, 1], or (n, d), as they are."""
        self.complete()
        features: Tensor = self.encoder(((x - self.mean) / self.std).float())
        return features

    def scale(self, features: Tensor) -> Tensor:
        """Return the inputs of the heads, or of the classifier if there are no heads, given the encoder's features."""
        if self.scaling == "none":
            return features
        members = features.chunk(self.members, dim=1)
        layout = self.layout or Layout.final(members[0].shape[1])
        return torch.cat([layout.scaled(member, self.scaling) for member in members], dim=1)

    def adapt(self, features: Tensor, beside: Tensor | None = None) -> Tensor:
        """Return the inputs of the classifier, given the features of the encoder, and those of columns of a table."""
        inputs = self.scale(features)
        inputs = inputs if beside is None else torch.cat([inputs, beside], dim=1)
        return inputs if self.adapter is None else self.adapter(inputs)

    def features(self, x: Tensor, beside: Tensor | None = None) -> Tensor:
        """Return the inputs of the classifier: the mean features of the views, through the adapter if there is one."""
        return self.adapt(mean_over_views(x, self.views, self.encode), beside)

    def forward(self, x: Tensor, beside: Tensor | None = None) -> Tensor:
        """Return logits (n, K). ``beside`` are the features of columns of a table, if the model has any."""
        logits: Tensor = self.classifier(self.features(x, beside))
        return logits


def _build(card: ModelCard, late: LateEncoder | None = None) -> Model:
    """Build the model that a card describes. The caller must replace its weights, unless ``late`` is its encoder."""
    vector = card.kind == "vector"
    encoder, features = (
        (late, card.features)
        if late is not None
        else build_encoder(
            card.encoder,
            channels=card.channels,
            image_size=None if vector else (card.shape[1], card.shape[2]),
            in_features=card.shape[0] if vector else None,
        )
    )
    if card.members > 1:
        rest = [copy.deepcopy(encoder) for _ in range(card.members - 1)]
        encoder, features = Ensemble([encoder, *rest], card.channels), features * card.members
    features += card.num_beside
    adapter = None if card.adapter is None else Adapter(features, **card.adapter.model_dump())
    width = features if adapter is None else adapter.width
    classifier = build_head(card.head, width, len(card.classes), shapes=card.distances)
    return Model(
        encoder, classifier, card.mean, card.std, card.kind, adapter, card.views, card.scaling, card.members
    )  # fmt: skip


def with_views(model: Model, card: ModelCard, views: Sequence[str]) -> ModelCard:
    """Let a model average its features over other views. Return its card with these views.

    Calibration and decision rule stay as they are, although they were fitted to the scores of the old views. The known
    images of the model have features of the old views, so that it no longer recognises unfamiliar images.
    """
    check_views(views, card.kind, card.shape)
    model.views = tuple(views)
    return card.model_copy(update={"views": model.views, "familiar": ""})


def save_model(folder: Path, model: Model, card: ModelCard) -> ModelCard:
    """Write ``model.safetensors``, then ``model.json`` with the hash of the weights. Return the card with this hash."""
    from safetensors.torch import save

    make_folder(folder)
    state = {key: value.detach().cpu().contiguous() for key, value in model.state_dict().items()}
    content = save(state, metadata={"format": "pt"})
    card = card.model_copy(update={"sha256": hashlib.sha256(content).hexdigest()})
    atomic_write(folder / WEIGHTS_NAME, content)
    atomic_write(folder / CARD_NAME, card.model_dump_json(indent=2) + "\n")
    return card


def load_model(folder: str | Path, device: str | torch.device = "cpu", *, fast: bool = True) -> tuple[Model, ModelCard]:
    """Load a model in eval mode. Raise a RunError of one sentence if a file is damaged or does not fit.

    With ``fast``, the encoder uses the same fast paths and memory layouts as training with ``fast``, so that it
    computes the same numbers.
    """
    from safetensors.torch import load

    folder = Path(folder)
    card = load_card(folder)
    path = folder / WEIGHTS_NAME
    try:
        check_regular(path)
        content = path.read_bytes()
    except OSError as error:
        raise RunError(f"{path} cannot be read ({error.strerror}). Train the model again.") from error
    if hashlib.sha256(content).hexdigest() != card.sha256:
        raise RunError(f"{path} does not belong to {CARD_NAME}: the file was changed or truncated.")
    try:
        with reading_tensors():
            state = load(content)
    except ValueError as error:
        raise RunError(f"{path} is not a safetensors file ({error}).") from error
    _check_numbers(state, path)
    _check_head(state, card, path)
    _check_adapter(state, card, path)
    _check_members(state, card, path)
    late = _late(state, card, fast) if torch.device(device).type == "cpu" else None
    try:
        if card.spec.parts[0].is_mlp:  # The card may ask for any size, so compare shapes before allocating memory.
            with torch.device("meta"):
                _check_shapes(_build(card), state, card, path)
        model = _build(card, late)
        _check_shapes(model, state, card, path)
    except RunError:
        raise
    except LopsidedError as error:
        raise RunError(f"{folder / CARD_NAME} describes a model that cannot be built: {error}") from error
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        got = " ".join(str(error).splitlines()[1].split()).rstrip(".") if "\n" in str(error) else str(error)
        raise RunError(f"{path} does not fit the encoder {card.encoder}: {got}.") from error
    if fast and late is None and _is_square(card):  # The size of the check above.
        arrange(model.encoder, torch.device(device), card.shape)
    return model.to(device).eval(), card


def _is_square(card: ModelCard) -> bool:
    return card.shape == (card.channels, card.image_size, card.image_size)


def _late(state: Mapping[str, Tensor], card: ModelCard, fast: bool) -> LateEncoder | None:
    """Return the encoder of a model without its layers, if the weights certainly fit them, otherwise None."""
    alone = card.members == 1 and card.channels == 3 and _is_square(card)
    known = embedded_encoder(EncoderSpec.parse(card.encoder, EMBEDDED), card.shape, fast) if alone else None
    if known is None or card.features != known.layout.width:
        return None
    expected = known.state_dict()
    own = {key.removeprefix("encoder."): value for key, value in state.items() if key.startswith("encoder.")}
    fits = own.keys() == expected.keys() and all(
        (value.shape, value.dtype) == (expected[key].shape, expected[key].dtype) for key, value in own.items()
    )
    return late_encoder(card.encoder, own, known.layout, card.shape, fast=fast) if fits else None


def _check_numbers(state: Mapping[str, Tensor], path: Path) -> None:
    """Raise if the weights are not finite real numbers, because every prediction would be wrong."""
    odd = [key for key, value in state.items() if value.is_complex() or value.is_quantized]
    if odd or not all_finite(value.float() for value in state.values() if value.is_floating_point()):
        got = f"complex numbers in {odd[0]}" if odd else "NaN or infinite numbers"
        raise RunError(f"{path} holds {got}. Train the model again.")


def _check_head(state: Mapping[str, Tensor], card: ModelCard, path: Path) -> None:
    """Raise if the classifier has another number of classes than the card, before building one of the card's size."""
    weight = state.get("classifier.weight")
    if weight is None or weight.shape[:1] != (len(card.classes),):
        got = "none" if weight is None else f"one of shape {tuple(weight.shape)}"
        raise RunError(sentence(f"{path} must hold a classifier for {len(card.classes):,} classes", got))


def _check_adapter(state: Mapping[str, Tensor], card: ModelCard, path: Path) -> None:
    """Raise if the heads of the file are not those of the card, before building heads of the card's size."""
    kinds = "adapter.", "classifier.distances."
    found = {key: tuple(value.shape) for key, value in state.items() if key.startswith(kinds)}
    with torch.device("meta"):
        distances = nn.ModuleList(Distance(shape) for shape in card.distances)
        heads = nn.ModuleDict({"classifier": nn.ModuleDict({"distances": distances})})
        if card.adapter is not None:
            heads["adapter"] = Adapter(card.features + card.num_beside, **card.adapter.model_dump())
    needed = {key: tuple(value.shape) for key, value in heads.state_dict().items()}
    read = [state[key] for key in found if key.endswith(".columns")]
    if found != needed or any(int(columns.min()) < 0 or int(columns.max()) >= card.features for columns in read):
        raise RunError(f"{path} does not hold the heads that {CARD_NAME} describes. Train the model again.")


def _check_members(state: Mapping[str, Tensor], card: ModelCard, path: Path) -> None:
    """Raise if the weights hold another number of encoders than the card, before building so many."""
    start = "encoder.members."
    found = len({key.removeprefix(start).partition(".")[0] for key in state if key.startswith(start)}) or 1
    needed = max(card.members, len(card.spec.parts))
    if found != needed:
        raise RunError(sentence(f"{path} must hold the weights of {needed} encoders", found))


def _check_shapes(model: Model, state: Mapping[str, Tensor], card: ModelCard, path: Path) -> None:
    """Raise if a weight has another shape or dtype. Missing weights raise later, when the state is loaded."""
    for key, value in model.state_dict().items():
        if key in state and (state[key].shape != value.shape or state[key].dtype != value.dtype):
            there, needed = (f"{t.dtype} of shape {tuple(t.shape)}" for t in (state[key], value))
            got = f"{key} is {there}, but must be {needed}"
            raise RunError(f"{path} does not fit the encoder {card.encoder:.80}: {got}.")


def load_card(folder: Path) -> ModelCard:
    """Read and check ``model.json`` without the weights."""
    import json

    path = folder / CARD_NAME
    do = "Give the folder of a finished run."
    if not path.is_file():
        raise RunError(f"{folder} holds no {CARD_NAME}. {do}")
    try:
        with path.open("rb") as file:
            content = json.loads(file.read(_MAX_CARD_BYTES))
    except OSError as error:
        raise RunError(f"{path} cannot be read ({error.strerror}).") from error
    except (ValueError, RecursionError) as error:
        raise RunError(f"{path} is not valid JSON. {do}") from error
    version = content.get("format") if isinstance(content, dict) else None
    if version != FORMAT:
        wrote = content.get("lopsided") if isinstance(content, dict) else None
        do = f"It was written by lopsided {wrote}; use that version." if isinstance(wrote, str) else do
        raise RunError(sentence(f"{path} must have format {FORMAT}", f"{version!r:.100}", do))
    try:
        card = ModelCard.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        got = f"{'.'.join(map(str, first['loc']))}: {first['msg'][:1].lower()}{first['msg'][1:]}"
        raise RunError(f"{path} is not a valid model card: {got}.") from error
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
    if wrong or min(card.std) <= 0 or (card.columns and card.shape != (len(card.columns),)):
        got = f"shape {card.shape!s:.80}, {len(card.mean)} means and {len(card.std)} deviations"
        got = f"{got} for {card.channels} channels"
        raise RunError(f"{path} does not describe valid inputs of a model of kind {card.kind}: {got}.")
    _check_decision(card, path)
    if not card.views or len(set(card.views)) < len(card.views) or not set(card.views) <= set(VIEWS):
        raise RunError(f"{path} must name different views of {', '.join(VIEWS)}, got {card.views!s:.80}.")
    try:
        check_views(card.views, card.kind, card.shape)
        EncoderSpec.parse(card.encoder, card.encoder_weights)
    except InputError as error:
        raise RunError(f"{path} describes a model that cannot be built: {error}") from error
    try:
        "".join(card.classes).encode("utf-8", "surrogateescape")  # Folder names may be invalid UTF-8.
    except UnicodeEncodeError:
        raise RunError(f"{path} holds a class name that is not valid Unicode (a lone surrogate).") from None
    if len(set(card.classes)) < len(card.classes):
        raise RunError(f"{path} must name each class once, but some of its {len(card.classes)} names are repeated.")


def _check_decision(card: ModelCard, path: Path) -> None:
    num = len(card.classes)
    if len(card.prior) != num or min(card.prior) < 0 or abs(math.fsum(card.prior) - 1) > 1e-6:
        raise RunError(f"{path} must hold a prior of {num} shares that add up to 1. Train the model again.")
    if not card.decision.fits(num):
        raise RunError(f"{path} holds a decision rule for another number of classes than {num}. Train the model again.")


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Return whether no weight is NaN or infinite."""
    values = [value.detach() for value in tensors if value.is_floating_point() and value.numel()]
    # The largest absolute value needs one pass over the memory, and it is NaN if a weight is NaN.
    return not values or bool(torch.stack([*torch._foreach_norm(values, math.inf)]).isfinite().all())


def look(images: Tensor, view: str) -> Tensor:
    """Return one view of images (n, c, h, w): every pixel has the value of another pixel."""
    return _LOOKS[view](images)


def mean_over_views(images: Tensor, views: Sequence[str], encode: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the mean of ``encode`` over views of images. Views are added up in order, so that the sum is repeatable.

    With one view, this is ``encode`` of that view, to the last bit. Several views go through ``encode`` as one batch,
    so that an exported file holds the encoder once.
    """
    if len(views) == 1:
        return encode(look(images, views[0]))
    rows = encode(torch.cat([look(images, view) for view in views]))
    parts = rows.reshape(len(views), -1, *rows.shape[1:])
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total / len(views)


_LOOKS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x,
    "hflip": lambda x: x.flip(-1),
    "vflip": lambda x: x.flip(-2),
    "rot180": lambda x: x.flip(-2, -1),
    "rot90": lambda x: torch.rot90(x, 1, (-2, -1)),
    "rot270": lambda x: torch.rot90(x, -1, (-2, -1)),
    "transpose": lambda x: x.transpose(-2, -1),
    "transverse": lambda x: x.flip(-2, -1).transpose(-2, -1),
}


_UNSET = {"temperature": 1.0, "bias": None, "calibrated_on": 0, "decision": MOST_PROBABLE, "sha256": ""}
"""Facts of a card that an average of models does not have."""


def average_classifiers(
    models: Sequence[tuple[Model, ModelCard]], biases: Sequence[Sequence[float]]
) -> tuple[Model, ModelCard]:
    """Return ``average`` of models that share a frozen encoder: one of them, with the mean of their linear layers."""
    model, card = models[0]
    with torch.no_grad():
        layers = [each.classifier for each, _ in models]
        weight = torch.stack([layer.weight for layer in layers]).mean(dim=0)
        bias = torch.stack([layer.bias + layer.bias.new_tensor(own) for layer, own in zip(layers, biases, strict=True)])
        model.classifier.weight.copy_(weight)
        model.classifier.bias.copy_(bias.mean(dim=0))
    return model, card.model_copy(update=_UNSET)


def average(
    models: Sequence[tuple[Model, ModelCard]],
    biases: Sequence[Sequence[float]] | None = None,
    shares: Sequence[float] | None = None,
) -> tuple[Model, ModelCard]:
    """Return one image model with the mean logits of several, after adding the ``biases`` of each model to its logits.

    The features of the members are joined, and the linear layer holds the layers of the members, times their
    ``shares``, which are equal by default. The card has the prior of the first model, and no decision.
    """
    first, card = models[0]
    for model, _ in models:
        model.complete()
    num, num_classes = len(models), len(card.classes)
    encoder = Ensemble([model.encoder for model, _ in models], card.channels)
    classifier = ClassifierHead(sum(model.classifier.in_features for model, _ in models), num_classes)
    offsets = torch.zeros(num, num_classes) if biases is None else torch.tensor(biases, dtype=torch.float32)
    with torch.no_grad():
        encoder.mean.copy_(torch.stack([model.mean.flatten().cpu() for model, _ in models]))
        encoder.std.copy_(torch.stack([model.std.flatten().cpu() for model, _ in models]))
        each = [1 / num] * num if shares is None else shares
        pairs = list(zip(each, (model.classifier for model, _ in models), strict=True))
        classifier.weight.copy_(torch.cat([share * layer.weight.cpu() for share, layer in pairs], dim=1))
        own = [share * (layer.bias.cpu() + bias) for (share, layer), bias in zip(pairs, offsets, strict=True)]
        classifier.bias.copy_(torch.stack(own).sum(dim=0))
    plain = {"mean": (0.0,) * card.channels, "std": (1.0,) * card.channels, "members": num}
    card = card.model_copy(update={**plain, **_UNSET, "features": classifier.in_features})
    joined = Model(
        encoder, classifier, card.mean, card.std, card.kind, views=card.views, scaling=card.scaling, members=num
    )  # fmt: skip
    return joined.to(first.classifier.weight.device).eval(), card
