"""Names of encoders and their pretrained weights: those in the package, and the preprocessing that belongs to weights.

The package holds the ImageNet weights of EfficientNet-Lite0, -Lite1 and -Lite2 without their classifiers.
``scripts/make_encoder.py`` makes the files from public packages and checks them. The header of a file holds the
preprocessing. So the preprocessing stays with the weights, and the model card takes it from there.

Weights on the Hugging Face hub are read as safetensors alone, which cannot run code. What was downloaded once is found
again without a network.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lopsided.errors import InputError, RunError, sentence
from lopsided.files import check_regular, reading_tensors, reason
from lopsided.recipe import MAX_SIDE
from lopsided.recipe.encoder_spec import HUB, MLP_NAME, NAMES, EncoderPart, EncoderSpec

WEIGHTS = ("model.safetensors", "open_clip_model.safetensors")
"""Names of files of weights: of timm, and of OpenCLIP."""
CONFIGS = {"config.json": "pretrained_cfg", "open_clip_config.json": "preprocess_cfg"}
"""Files beside them, and the section about images."""
_DO = "Set encoder.weights to a local .safetensors file, or to none."


@dataclass(frozen=True)
class HubWeights:
    """A file of weights, where it is from, and its licence; None if nobody states it."""

    address: str
    path: Path
    licence: str | None

    @property
    def megabytes(self) -> float:
        """The size of the file."""
        return self.path.stat().st_size / 1e6


def hub_weights(spec: EncoderSpec) -> Iterator[tuple[EncoderPart, HubWeights]]:
    """Yield the encoders whose weights are on the hub, with their files."""
    for part in spec.parts:
        if part.weights == "timm" or part.is_hub:
            yield part, download(part.name, part.weights)


def download(name: str, weights: str) -> HubWeights:
    """Return the weights of an encoder, "timm" or an address, from the local cache or from the hub."""
    from lopsided.models.encoders import timm_config

    if MLP_NAME.fullmatch(name):
        raise InputError(sentence('encoder.weights must be "none" or a file for an mlp', f'"{weights}"'))
    config = timm_config(name)
    address = HUB.fullmatch(weights)
    if address is not None:
        found = _file(name, address[1], WEIGHTS, address[2])
        return HubWeights(f"{address[1]} at {address[2][:8]}", found, config_of(weights).get("license"))
    if config is None or not config.hf_hub_id:
        raise InputError(f"timm has no weights for {name} on the Hugging Face hub. {_DO}")
    return HubWeights(config.hf_hub_id, _file(name, config.hf_hub_id, WEIGHTS[:1]), config.license)


@cache
def config_of(weights: str) -> dict[str, Any]:
    """Return what the repository of an address says about the images of its weights, in timm's words, or nothing."""
    address = HUB.fullmatch(weights)
    if address is None:
        return {}
    for file, section in CONFIGS.items():
        with suppress(Exception):  # The files are optional, and may be those of another library.
            config = json.loads(_fetch(address[1], file, address[2]).read_bytes())[section]
            if isinstance(config, dict):
                return config
    return {}


def _file(name: str, repository: str, files: Sequence[str], commit: str | None = None) -> Path:
    """Return the first of these files that a repository has."""
    from huggingface_hub.constants import HF_HUB_CACHE
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    problem: Exception | None = None
    for file in files:
        try:
            return _fetch(repository, file, commit)
        except EntryNotFoundError as error:
            problem = problem or error
        # The hub also raises other exceptions, and those of its HTTP library. All mean that the file is not available.
        except Exception as error:
            problem = problem or error
            break
    what = f"The weights {repository}/{files[0]} of {name}"
    if isinstance(problem, LocalEntryNotFoundError):
        do = f"Fit once with a network, or copy the hub's cache from elsewhere. {_DO}"
        raise InputError(f"{what} are not in {HF_HUB_CACHE}, and the hub cannot be reached. {do}") from problem
    line = (str(problem).strip().splitlines() or [type(problem).__name__])[0].rstrip(".")
    raise InputError(f"{what} could not be downloaded: {type(problem).__name__} ({line}). {_DO}") from problem


def _fetch(repository: str, file: str, commit: str | None) -> Path:
    from huggingface_hub import hf_hub_download

    if commit is None:
        return Path(hf_hub_download(repo_id=repository, filename=file))
    return Path(hf_hub_download(repo_id=repository, filename=file, revision=commit))


EMBEDDED = "embedded"
EMBEDDED_ENCODER = "tf_efficientnet_lite0"
EMBEDDED_SHA256 = {
    "tf_efficientnet_lite0": "938dc2fc631124f64b54781e8836e9547c2444cedd18962532ce5a1a293cf9e8",
    "tf_efficientnet_lite1": "66a9aa71e4658c1fbf6e80720a7629d9d43506238c2eb0de97defc5d6d822b27",
    "tf_efficientnet_lite2": "76f9c35116142945055f10f21446047c25f5ac5aff75edd71d44b40e5f6f6c76",
}
"""SHA-256 of the embedded file of each encoder, as ``scripts/make_encoder.py`` prints it."""

HEADER_KEY = "lopsided"
"""Name of the metadata entry that holds the preprocessing as JSON."""

_REGISTERED = re.compile(r"^@register_model\s+def (\w+)\(", flags=re.MULTILINE)
_QUOTED = re.compile(r"'(\w+)'")
_LEAST = 100
"""timm has hundreds of models. If fewer are found, its files look different, and only timm itself can tell."""
_SCALE = 1e30
"""Largest absolute value of a mean or a deviation, and of the inverse of a deviation."""


@dataclass(frozen=True)
class Preprocessing:
    """How images must be prepared for the weights of an encoder.

    Images are resized to ``image_size`` pixels per side, and divided by 255. Then ``mean`` is subtracted, and the
    result is divided by ``std``, one number per channel. ``small_size`` is the side for images that are much smaller
    than ``image_size``; None: there is no such rule.
    """

    image_size: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    small_size: int | None = None
    interpolation: str = "bilinear"

    def side(self, longest: int) -> int:
        """Return the side to which images are resized whose longer side has ``longest`` pixels.

        >>> ImageNet = Preprocessing(224, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5), small_size=112)
        >>> ImageNet.side(28), ImageNet.side(600)
        (112, 224)
        """
        is_small = self.small_size is not None and 2 * longest <= self.small_size
        return self.small_size if is_small and self.small_size is not None else self.image_size

    def to_json(self) -> str:
        """Return the fields as JSON, for the header of a file of weights."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Preprocessing:
        """Read the result of ``to_json``. Raise a ValueError if a value is not possible."""
        try:
            content = json.loads(text)
            found = cls(
                image_size=content["image_size"],
                mean=tuple(content["mean"]),
                std=tuple(content["std"]),
                small_size=content["small_size"],
                interpolation=content["interpolation"],
            )
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(reason(error)) from None
        sides = [found.image_size] if found.small_size is None else [found.image_size, found.small_size]
        numbers = [*found.mean, *found.std]
        if not all(type(side) is int and 1 <= side <= MAX_SIDE for side in sides):
            raise ValueError(f"the image size is {sides!r:.80}")
        if not len(found.mean) == len(found.std) == 3 or not all(isinstance(n, int | float) for n in numbers):
            raise ValueError("mean and std must have 3 numbers each")
        if not all(math.isfinite(n) and abs(n) < _SCALE for n in numbers) or min(found.std) < 1 / _SCALE:
            raise ValueError(f"mean {found.mean!r:.80} and std {found.std!r:.80} cannot be used")
        if found.interpolation != "bilinear":
            raise ValueError(f"the interpolation is {found.interpolation!r:.40}, but only bilinear is supported")
        return found


def preprocessing_of(encoder: str, weights: str) -> Preprocessing:
    """Return the preprocessing of an encoder's weights: "embedded", "timm", an address, or a path of safetensors.

    A file of another program has no preprocessing in its header. For such a file, and for timm's weights, timm's
    configuration of the encoder is used. Joined encoders have the sizes of the first one, and normalise the pixels
    themselves.
    """
    spec = EncoderSpec.parse(encoder, weights)
    if spec.is_joined:
        first = preprocessing_of(spec.parts[0].name, spec.parts[0].weights)
        return replace(first, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
    if weights == EMBEDDED:
        check_embedded(encoder)
        return _embedded_preprocessing(encoder)
    header = _header(Path(weights)) if spec.files else ""
    if header:
        try:
            return Preprocessing.from_json(header)
        except ValueError as error:
            raise InputError(f"{weights} has a header with an invalid preprocessing: {error}.") from None
    return _timm_preprocessing(spec.parts[0])


def check_encoder(spec: EncoderSpec) -> None:
    """Raise if an encoder or its weights certainly do not exist, without importing torch or timm."""
    for part in spec.parts:
        if not part.is_mlp and part.name not in EMBEDDED_SHA256:
            _check_timm_name(part.name)
        if part.weights == EMBEDDED:
            check_embedded(part.name)
        elif part.is_file and not os.path.exists(part.weights):
            got = f"{part.weights} (No such file or directory)"
            raise InputError(sentence("encoder.weights must be a readable safetensors file", got))


def embedded_file(encoder: str = EMBEDDED_ENCODER) -> Path:
    """Return the path of the embedded weights of an encoder. Raise if the file is missing or damaged."""
    name = f"{encoder.removeprefix('tf_')}.safetensors"
    path = Path(str(resources.files("lopsided.models") / "embedded" / name))
    try:
        content = path.read_bytes()
    except OSError as error:
        got = f"cannot be read ({error.strerror})"
    else:
        if hashlib.sha256(content).hexdigest() == EMBEDDED_SHA256[encoder]:
            return path
        got = "is damaged"
    raise RunError(f"The file of the embedded weights {got}: {path}. Install lopsided again.")


def check_embedded(encoder: str) -> None:
    """Raise unless there are embedded weights of this encoder."""
    if encoder not in EMBEDDED_SHA256:
        must = f'encoder.name must be one of {", ".join(EMBEDDED_SHA256)} with encoder.weights = "embedded"'
        raise InputError(sentence(must, f"{encoder!r:.100}", "Set encoder.name, or use other weights."))


@cache
def _embedded_preprocessing(encoder: str) -> Preprocessing:
    return Preprocessing.from_json(_header(embedded_file(encoder)))


def _header(path: Path) -> str:
    """Return the entry of the header with the preprocessing, or "" if there is none."""
    from safetensors import safe_open

    try:
        check_regular(path)
        with reading_tensors(), safe_open(path, framework="np") as file:
            return str((file.metadata() or {}).get(HEADER_KEY, ""))
    except (OSError, ValueError) as error:
        got = f"{path} ({reason(error)})"
        raise InputError(sentence("encoder.weights must be a readable safetensors file", got)) from None


def _timm_preprocessing(part: EncoderPart) -> Preprocessing:
    """Return the preprocessing by timm's configuration of an encoder, or by that of the repository of its weights."""
    from lopsided.models.encoders import timm_config
    from lopsided.models.pretrained import config_of

    config: Any = None if part.is_mlp else timm_config(part.name)
    if config is None:
        do = "Write it into the header of the file, or set augment.normalisation to another value."
        raise InputError(f"The weights of {part.name} have no preprocessing. {do}")
    stated = config_of(part.weights)
    mean, std, shape = (stated.get(name) or getattr(config, name) for name in ("mean", "std", "input_size"))
    found = Preprocessing(int(shape[-1]), tuple(map(float, mean)), tuple(map(float, std)))  # type: ignore[arg-type]
    try:
        return Preprocessing.from_json(found.to_json())  # The numbers of a repository may be anything.
    except ValueError as error:
        raise InputError(f"{part.weights} has an invalid preprocessing: {error}.") from None


def _check_timm_name(name: str) -> None:
    """Raise if timm certainly has no model of this name. Its files are searched; they are not imported."""
    if "timm" in sys.modules:  # Another package may have added models.
        import timm

        if not timm.is_model(name):
            raise unknown_encoder(name, timm.list_models())
        return
    models, quoted = _timm_names()
    arch = name.partition(".")[0]
    if len(models) >= _LEAST and arch not in models and arch not in quoted:
        raise unknown_encoder(name, sorted(models))


def unknown_encoder(name: str, known: Iterable[str]) -> InputError:
    """Return the error for an unknown encoder, with the most similar names."""
    near = difflib.get_close_matches(name[:100], ["mlp", *NAMES, *known], n=3)
    near = [NAMES[name].encoder] if name in NAMES else near  # A recipe in a file has full names.
    do = f"Did you mean {' or '.join(near)}?" if near else "timm.list_models() lists them."
    return InputError(sentence('encoder.name must be a timm model or "mlp"', f"{name!r:.100}", do))


@cache
def _timm_names() -> tuple[frozenset[str], frozenset[str]]:
    """Return the names of timm's models, and all quoted names in the same files, such as older names of models."""
    timm = find_spec("timm")
    folders = [] if timm is None else list(timm.submodule_search_locations or ())
    models: set[str] = set()
    quoted: set[str] = set()
    for folder in folders:
        for path in sorted((Path(folder) / "models").glob("*.py")):
            text = path.read_text(encoding="utf-8", errors="replace")
            models.update(_REGISTERED.findall(text))
            quoted.update(_QUOTED.findall(text))
    return frozenset(models), frozenset(quoted)
