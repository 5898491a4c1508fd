"""What ``encoder.name`` and ``encoder.weights`` say: encoders with their weights, and feature blocks, joined by ``+``.

    tf_efficientnet_lite0                                 one encoder
    tf_efficientnet_lite0+pixels                          its features, and those of the block ``pixels``
    tf_efficientnet_lite0+resnet50+pixels:0.5             two encoders, and a block with another weight
    embedded                                              the weights of one encoder, or of each
    embedded+/files/resnet50.safetensors                  the weights of each encoder
    hf-hub:OWNER/NAME@COMMIT                              weights on the Hugging Face hub, as they are in a commit

Only this module takes these texts apart. A short name, such as ``dinov2-small``, stands for a timm model, the weights
that timm has for it, and the side of its images. It is replaced where a recipe is made, so recipes, records and models
hold timm's names. Weights of anybody else have an address with the commit, because what a name means may change.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lopsided.errors import InputError, sentence
from lopsided.recipe.blocks import Block, find
from lopsided.recipe.views import computed_views

if TYPE_CHECKING:
    from lopsided.recipe.schema import Recipe


HUB = re.compile(r"hf-hub:([\w.-]+/[\w.-]+)@([0-9a-f]{40})")
"""An address of weights: the repository and the commit."""


@dataclass(frozen=True)
class Named:
    """A timm model with its tag, and the side of its images if timm's is too large for a CPU."""

    encoder: str
    image_size: int | None = None


NAMES = {
    "dinov2-small": Named("vit_small_patch14_dinov2.lvd142m", 224),
    "dinov2-base": Named("vit_base_patch14_dinov2.lvd142m", 224),
    "dinov3-small": Named("vit_small_patch16_dinov3.lvd1689m", 224),
    "dinov3-base": Named("vit_base_patch16_dinov3.lvd1689m", 224),
    "dinov3-convnext-tiny": Named("convnext_tiny.dinov3_lvd1689m", 224),
    "siglip-base": Named("vit_base_patch16_siglip_224.webli"),
    "siglip2-base": Named("vit_base_patch16_siglip_224.v2_webli"),
    "clip-base": Named("vit_base_patch16_clip_224.laion2b"),
    "convnext-tiny": Named("convnext_tiny.in12k_ft_in1k"),
    "convnextv2-tiny": Named("convnextv2_tiny.fcmae_ft_in22k_in1k"),
    "lite0": Named("tf_efficientnet_lite0"),
}


def with_full_names(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return changes of a recipe with timm's names instead of short ones.

    The weights are timm's unless the changes have others, or embedded ones exist. So is the side of the images.

    >>> with_full_names({"encoder.name": "dinov2-small+stages"})  # doctest: +NORMALIZE_WHITESPACE
    {'encoder.name': 'vit_small_patch14_dinov2.lvd142m+stages', 'encoder.weights': 'timm',
     'augment.normalisation': 'weights', 'data.image_size': 224}
    """
    words = str(changes.get("encoder.name", "")).split("+")
    named = [NAMES[word] for word in words if word in NAMES]
    if not named:
        return dict(changes)
    full = {**changes, "encoder.name": "+".join(NAMES[word].encoder if word in NAMES else word for word in words)}
    embedded = all(each is NAMES["lite0"] for each in named)
    full.setdefault("encoder.weights", "embedded" if embedded else "timm")
    full.setdefault("augment.normalisation", "weights")
    if named[0].image_size is not None:
        full.setdefault("data.image_size", named[0].image_size)
    return full


Scaling = Literal["none", "root", "cube-root"]
MAX_JOINED = 16
"""The largest number of joined encoders and blocks."""
WEIGHT_NAMES = ("none", "embedded", "timm")
"""Values of ``encoder.weights`` that are not paths."""
MLP_NAME = re.compile(r"mlp((?:-\d{1,5})*)|identity")
_JOINT, _SHARE = "+", ":"


def is_weights(text: str) -> bool:
    """Return whether a text is a word for weights, an address on the hub, or ends like a file of weights."""
    return text in WEIGHT_NAMES or text.endswith(".safetensors") or HUB.fullmatch(text) is not None


def ends_with_weights(text: str) -> bool:
    """Return whether a text may be the value of ``encoder.weights``, whatever the number of encoders is."""
    return is_weights(text.rpartition(_JOINT)[2])


@dataclass(frozen=True)
class EncoderPart:
    """One network and its weights: a word of ``WEIGHT_NAMES``, an address on the hub, or the path of a file."""

    name: str
    weights: str

    @property
    def is_file(self) -> bool:
        """Whether the weights are those of a file."""
        return self.weights not in WEIGHT_NAMES and not self.is_hub

    @property
    def is_hub(self) -> bool:
        """Whether the weights have an address on the Hugging Face hub."""
        return HUB.fullmatch(self.weights) is not None

    @property
    def is_mlp(self) -> bool:
        """Whether this is an MLP, such as "mlp" or "mlp-512-64", or the encoder without layers."""
        return MLP_NAME.fullmatch(self.name) is not None


@dataclass(frozen=True)
class EncoderSpec:
    """The encoders of a model with their weights, the blocks beside their final layers, and how both are used."""

    name: str
    """The encoders and blocks as the user writes them."""
    weights: str
    """The weights as the user writes them."""
    parts: tuple[EncoderPart, ...]
    blocks: tuple[Block, ...] = ()
    views: str = "none"
    scaling: Scaling = "none"

    @classmethod
    @lru_cache(maxsize=256)
    def parse(cls, name: str, weights: str = "none", views: str = "none", scaling: Scaling = "none") -> EncoderSpec:
        """Read the fields of a recipe or of a model card. Raise an InputError if they do not fit each other.

        >>> spec = EncoderSpec.parse("tf_efficientnet_lite0+resnet50+pixels", "embedded+resnet50.safetensors")
        >>> spec.names, spec.files, [block.name for block in spec.blocks]
        (['tf_efficientnet_lite0', 'resnet50'], ['resnet50.safetensors'], ['pixels'])
        """
        words = name.split(_JOINT)
        found = [_block(word, first=not place) for place, word in enumerate(words)]
        number = sum(block is None for block in found)
        blocks = tuple(block for block in found if block is not None)
        if not number or any(block is None for block in found[number:]) or len({b.name for b in blocks}) < len(blocks):
            do = f"Write it once, as in tf_efficientnet_lite0{_JOINT}{blocks[0].name}."
            must = f"encoder.name must have {blocks[0].name} after the encoders that it is joined to"
            raise InputError(sentence(must, f"{name:.200}", do))
        if len(words) > MAX_JOINED or (len(words) > 1 and not all(words)):
            got = f"{len(words)}" if all(words) else repr(name)
            raise InputError(sentence(f"encoder.name must join at most {MAX_JOINED} encoders, none of them empty", got))
        names = words[:number]
        parts = tuple(map(EncoderPart, names, _split_weights(weights, names)))
        vectors = next((part.name for part in parts if part.is_mlp), None)
        if vectors is not None and len(words) > 1:
            raise InputError(sentence("joined encoders must be models of timm", repr(vectors)))
        return cls(name, weights, parts, blocks, views, scaling)

    @property
    def names(self) -> list[str]:
        """The names of the networks."""
        return [part.name for part in self.parts]

    @property
    def files(self) -> list[str]:
        """The paths of the files of weights."""
        return [part.weights for part in self.parts if part.is_file]

    @property
    def is_joined(self) -> bool:
        """Whether features of several encoders or blocks are side by side. Each then normalises images itself."""
        return len(self.parts) + len(self.blocks) > 1

    @property
    def is_embedded(self) -> bool:
        """Whether weights of the package are among the weights."""
        return any(part.weights == "embedded" for part in self.parts)

    @property
    def weights_kind(self) -> str:
        """The word for the weights of a record: one of ``WEIGHT_NAMES``, or "file" for anything else."""
        return self.weights if self.weights in WEIGHT_NAMES else "file"

    @property
    def passes(self) -> int:
        """How often an image goes through a network if it is not augmented: once for each encoder and each view."""
        return len(self.parts) * len(computed_views(self.views))

    def has_features_of(self, other: EncoderSpec) -> bool:
        """Return whether the features of another encoder are among its own, so that one cache serves both."""
        same = (self.parts, self.views, self.scaling) == (other.parts, other.views, other.scaling)
        return same and {block.name for block in other.blocks} <= {block.name for block in self.blocks}

    def reading(self, kind: Literal["image", "encoder"]) -> list[Block]:
        """Return the blocks that are computed from images, or from layers of each encoder."""
        return [block for block in self.blocks if block.reads == kind]

    def change_files(self, change: Callable[[str], str]) -> str:
        """Return ``encoder.weights`` with a change of each path in it. Words stay as they are."""
        if self.weights in WEIGHT_NAMES:
            return self.weights
        return _JOINT.join(change(part.weights) if part.is_file else part.weights for part in self.parts)

    def without_folders(self) -> str:
        """Return ``encoder.weights`` with the names of files alone, which are the same on every machine."""
        return self.change_files(lambda path: Path(path).name)


def _block(word: str, *, first: bool) -> Block | None:
    """Return the block that a word names, with its weight if the word states one."""
    name, mark, text = word.partition(_SHARE)
    # The first word is an encoder, so that a recipe of one encoder never waits for a search of installed packages.
    block = find(name, built_in=first)
    if block is None or not mark:
        return block
    try:
        share = float(text)
    except ValueError:
        share = math.nan
    if not (math.isfinite(share) and share > 0):
        raise InputError(sentence(f"the weight of {name} in encoder.name must be a number > 0", f"{text!r:.80}"))
    return replace(block, share=share)


def _split_weights(weights: str, names: list[str]) -> list[str]:
    """Return the weights of each of these encoders. One word, such as "embedded", counts for all of them.

    A path may contain the sign between weights: only a word or the end of a file name ends a part.
    """
    if weights in WEIGHT_NAMES:
        return [weights] * len(names)
    if len(names) == 1:
        if not is_weights(weights):
            raise InputError(sentence("encoder.weights must be those of one encoder", f"{weights!r:.200}"))
        return [weights]
    parts, open_part = [], ""
    for piece in weights.split(_JOINT):
        text = f"{open_part}{piece}"
        done = is_weights(text)
        parts += [text] if done else []
        open_part = "" if done else f"{text}{_JOINT}"
    if len(parts) == len(names) and not open_part:
        return parts
    must = f"encoder.weights must name weights for each of the {len(names)} encoders {', '.join(names):.200}"
    raise InputError(sentence(must, f"{weights!r:.200}", f"Put {_JOINT} between them, as in encoder.name."))


def encoder_conflicts(recipe: Recipe) -> Iterator[str]:
    """Yield a sentence for every conflict inside the section ``encoder``, or of it with other fields."""
    section, method = recipe.encoder, recipe.method
    if section.scaling != "none" and not recipe.spec.pretrained:
        do = "Only the features of a pretrained encoder are scaled."
        yield sentence(f'encoder.scaling must be "none" with method "{method}"', f'"{section.scaling}"', do)
    try:
        spec = section.spec
    except InputError as error:
        yield str(error)
        return
    yield from _weights_conflicts(recipe)
    if not spec.is_joined:
        return
    if recipe.spec.trains_encoder:
        do = "Only frozen encoders can be joined."
        yield sentence(f'encoder.name must be one encoder with method "{method}"', section.name, do)
    local = [block.name for block in spec.blocks if block.is_local]
    if local and not recipe.spec.reads_positions:
        do = f"Leave out {_JOINT}{local[0]}, or use --recipe few."
        yield f'encoder.name cannot have {local[0]} with method "{method}", which reads no single positions. {do}'
    if recipe.data.channels == 1:
        do = "Leave out data.channels: grey images are repeated to three channels. Or name one encoder, without +."
        yield sentence(f"data.channels must be unset or 3 with the encoder {section.name}", 1, do)
    if section.weights != "none" and any(part.weights == "none" for part in spec.parts):
        yield sentence('encoder.weights cannot hold "none" for one of several encoders', repr(section.weights))


def _weights_conflicts(recipe: Recipe) -> Iterator[str]:
    """Yield a sentence if the pixels or the method do not fit the encoder's weights."""
    weights, scale, method = recipe.encoder.weights, recipe.augment.normalisation, recipe.spec
    vectors = recipe.encoder.name == "identity" and not method.trains_encoder
    if weights == "none" and method.pretrained and not vectors:
        do = f"Start from --recipe {method.example}, or set encoder.weights"
        do += ", or use the recipe from-scratch" * method.trains_encoder
        yield f'encoder.weights cannot be "none" with method "{method.name}"{method.no_weights} {do}.'
    elif weights == "none" and scale == "weights":
        do = 'Set encoder.weights, or augment.normalisation = "source".'
        yield f'augment.normalisation cannot be "weights" without pretrained weights. {do}'
    elif (
        weights == "embedded" or (recipe.encoder.spec.is_joined and not method.trains_encoder)
    ) and scale != "weights":
        what = 'encoder.weights = "embedded"' if weights == "embedded" else "joined encoders"
        yield sentence(f'augment.normalisation must be "weights" with {what}', f'"{scale}"')
