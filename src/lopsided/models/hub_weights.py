"""Weights on the Hugging Face hub: those that timm has for a model, and those of an address with its commit.

Only safetensors are read, which cannot run code. What was downloaded once is found again without a network.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lopsided.errors import InputError, sentence
from lopsided.recipe.encoder_names import HUB
from lopsided.recipe.encoder_spec import MLP_NAME, EncoderPart, EncoderSpec

WEIGHTS = ("model.safetensors", "open_clip_model.safetensors")
"""Names of files of weights: of timm, and of OpenCLIP."""
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


def config_of(weights: str) -> dict[str, Any]:
    """Return what the repository of an address says about the images of its weights, in timm's words, or nothing."""
    address = HUB.fullmatch(weights)
    if address is None:
        return {}
    try:
        content = json.loads(_fetch(address[1], "config.json", address[2]).read_bytes())
    except Exception:  # The file is optional, and may be that of another library.
        return {}
    config = content.get("pretrained_cfg") if isinstance(content, dict) else None
    return config if isinstance(config, dict) else {}


def _file(name: str, repository: str, files: Sequence[str], commit: str | None = None) -> Path:
    """Return the first of these files that a repository has."""
    from huggingface_hub.errors import EntryNotFoundError

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
    line = (str(problem).strip().splitlines() or [type(problem).__name__])[0].rstrip(".")
    what = f"The weights {repository}/{files[0]} of {name} could not be downloaded"
    raise InputError(f"{what}: {type(problem).__name__} ({line}). {_DO}") from problem


def _fetch(repository: str, file: str, commit: str | None) -> Path:
    from huggingface_hub import hf_hub_download

    if commit is None:
        return Path(hf_hub_download(repo_id=repository, filename=file))
    return Path(hf_hub_download(repo_id=repository, filename=file, revision=commit))
