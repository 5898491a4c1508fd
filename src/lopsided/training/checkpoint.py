"""The state of an unfinished run, from which it goes on as if nothing had happened.

``checkpoint/state.safetensors`` holds the weights in training and the optimizer's state, and in its header, as JSON,
the rest: one file, so that one rename makes the step from epoch to epoch. ``chosen-STAGE-EPOCH.safetensors`` holds the
best weights of the stage so far, and ``encoder.safetensors`` the encoder of a finished first stage. Files that the
state does not name are left over from a killed process and are removed. A finished run keeps the header alone.

A state is written after the first epoch, and then after an epoch when writing has taken at most a twentieth of the time
since: an epoch of a second is not followed by a second of writing.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from pydantic import TypeAdapter
from torch import Tensor, nn

from lopsided.distributed import Ranks
from lopsided.errors import LopsidedError, RunError, sentence
from lopsided.files import atomic_write, check_regular, make_folder, reading_tensors, reason, remove_leftovers
from lopsided.models.model import all_finite

FORMAT = 1
FOLDER_NAME, STATE_NAME, ENCODER_NAME = "checkpoint", "state.safetensors", "encoder.safetensors"
TIMES_AS_LONG = 20.0
"""Seconds of training for a second of writing."""
_KEY = "lopsided"
_STAGES = ("encoder", "classifier", "end-to-end")
_CHOSEN = re.compile(r"chosen-[a-z-]+-\d+\.safetensors")
_STEP, _MOMENTUM = "step", "momentum_buffer"
_FIT = "a checkpoint must fit the recipe that it is resumed with"
_AGAIN = "Remove the checkpoint folder to start the run anew."


@dataclass
class State:
    """Where a run stands: ``epoch`` epochs of ``stage`` are done."""

    recipe: str
    data: str
    stage: str
    epoch: int = 0
    selection: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, float | int | str | None]] = field(default_factory=list)
    chosen: str | None = None
    finished: bool = False
    seconds: float = 0.0
    threads: int = 1
    ranks: int = 1
    fast: bool = True
    torch: str = torch.__version__
    format: int = FORMAT


class Checkpoint:
    """The checkpoint of a run folder; without a folder nothing is written.

    Of several ranks the first one alone reads and writes files; the others are told what it has read.
    """

    def __init__(self, folder: Path | None, ranks: Ranks | None = None) -> None:
        self.folder = None if folder is None else folder / FOLDER_NAME
        self.ranks = ranks or Ranks()
        self._last: State | None = None
        self._saved, self._cost, self._beside = -math.inf, 0.0, 0.0

    def due(self) -> bool:
        """Whether the last writing was long enough ago, measured by what it cost."""
        if self.folder is None:
            return False
        due: bool = self.ranks.told(lambda: perf_counter() - self._saved >= self._cost * TIMES_AS_LONG)
        return due

    def exists(self) -> bool:
        """Whether a state was written."""
        return self.folder is not None and (self.folder / STATE_NAME).exists()

    def save(self, state: State, tensors: Mapping[str, Tensor]) -> None:
        """Make ``state`` the one to go on from."""
        if self.folder is None:
            return
        begin = perf_counter()
        if self.ranks.first:
            self._write(STATE_NAME, tensors, json.dumps(asdict(state)))
        self._saved = perf_counter()
        self._cost, self._beside = self._beside + self._saved - begin, 0.0
        self.tidy(state)
        self._last = State(**asdict(state))

    def tidy(self, state: State) -> None:
        """Remove the weights that a state does not name, and what a killed process left."""
        if self.folder is None or not self.ranks.first:
            return
        kept = set() if state.finished else {state.chosen, ENCODER_NAME if state.stage == "classifier" else None}
        for path in self.folder.iterdir():
            if path.name not in kept and (path.name == ENCODER_NAME or _CHOSEN.fullmatch(path.name)):
                with suppress(OSError):
                    path.unlink()
        remove_leftovers(self.folder)

    def save_weights(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Write weights beside the state, which is to name them next."""
        if self.folder is not None and self.ranks.first:
            begin = perf_counter()
            self._write(name, tensors, "{}")
            self._beside += perf_counter() - begin

    def load(self) -> tuple[State, dict[str, Tensor]] | None:
        """Read the state and its tensors; None if there is none."""
        if not self.ranks.told(self.exists):
            return None
        tensors, text = self._read(STATE_NAME)
        try:
            content = json.loads(text)
            if content["format"] != FORMAT:
                got = f"format {content['format']!r:.80}"
                raise RunError(sentence(f"{self.folder} must be of format {FORMAT}", got, _AGAIN))
            state = TypeAdapter(State).validate_python(content)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise RunError(sentence(f"{self.folder} must hold the state of a run", "another file", _AGAIN)) from error
        odd = next(_odd_fields(state), None)
        if odd is not None:
            got = f"{odd} {getattr(state, odd)!r:.40}"
            raise RunError(sentence(f"{self.folder} must hold the state of a run", got, _AGAIN))
        self._last = State(**asdict(state))
        return state, tensors

    def load_weights(self, name: str) -> dict[str, Tensor]:
        """Read weights that the state names."""
        return self._read(name)[0]

    def last_good(self) -> str:
        """Say where a run that broke off can be taken up."""
        if self.folder is None:
            return "There is no checkpoint, because no folder was given."
        if self._last is None:
            return "There is no checkpoint yet."
        after = f"after epoch {self._last.epoch} of stage {self._last.stage}"
        return f"The last good checkpoint is {self.folder / STATE_NAME}, {after}."

    def _write(self, name: str, tensors: Mapping[str, Tensor], text: str) -> None:
        from safetensors.torch import save

        assert self.folder is not None
        make_folder(self.folder)
        # One key alone: the order of several would differ from process to process.
        content = save({key: value.detach().cpu().contiguous() for key, value in tensors.items()}, {_KEY: text})
        atomic_write(self.folder / name, content)

    def _read(self, name: str) -> tuple[dict[str, Tensor], str]:
        texts: list[str] = []

        def read() -> dict[str, Tensor]:
            tensors, text = self._read_file(name)
            texts.append(text)
            return tensors

        tensors = self.ranks.spread(read)
        return tensors, self.ranks.told(lambda: texts[0])

    def _read_file(self, name: str) -> tuple[dict[str, Tensor], str]:
        from safetensors import safe_open

        assert self.folder is not None
        path = self.folder / name
        try:
            check_regular(path)
            with reading_tensors(), safe_open(path, framework="pt") as file:
                tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  It is no mapping.
                return tensors, (file.metadata() or {}).get(_KEY, "")
        except OSError as error:
            raise RunError(sentence(f"{path} must be readable", reason(error), _AGAIN)) from error
        except ValueError as error:
            raise RunError(sentence(f"{path} must be a whole safetensors file", error, _AGAIN)) from error


def _odd_fields(state: State) -> Iterator[str]:
    """Yield the fields that no run writes so: a folder may come from someone else."""
    good = {
        "stage": state.stage in _STAGES,
        "epoch": state.epoch >= 0,
        "chosen": state.chosen is None or _CHOSEN.fullmatch(state.chosen),  # It is the name of a file to be read.
        "seconds": 0 <= state.seconds < math.inf,
        "threads": 1 <= state.threads < 2**31,
        "ranks": 1 <= state.ranks < 2**31,
    }
    yield from (name for name, is_good in good.items() if not is_good)


def check_course(state: State, tensors: Mapping[str, Tensor], epochs: Mapping[str, int]) -> None:
    """Refuse a state that no run comes to whose stages, in this order, have so many epochs."""
    got = ""
    if state.stage not in epochs:
        got = f"stage {state.stage}"
    elif state.epoch > epochs[state.stage]:
        got = f"epoch {state.epoch!r:.40} of {epochs[state.stage]} in stage {state.stage}"
    elif state.epoch and not tensors and not state.finished:
        got = f"no weights after epoch {state.epoch}"
    elif not _is_history(state, epochs):
        got = f"a history of other epochs than {state.epoch} of stage {state.stage} and all before"
    if got:
        raise RunError(sentence(_FIT, got, _AGAIN))


def _is_history(state: State, epochs: Mapping[str, int]) -> bool:
    """Whether each epoch up to the state's has its line; a stage before may have stopped early."""
    lines = [(line.get("stage"), line.get("epoch")) for line in state.history]
    for name, most in epochs.items():
        done = state.epoch if name == state.stage else sum(stage == name for stage, _ in lines)
        if done > most or lines[:done] != [(name, epoch + 1) for epoch in range(done)]:
            return False
        lines = lines[done:]
        if name == state.stage:
            break
    return not lines


def training_tensors(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """All tensors of what a stage trains and of its optimizer, by name."""
    tensors = dict(module.state_dict())
    for index, values in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{index}.{k}": v for k, v in values.items() if isinstance(v, Tensor)}
    return tensors


def restore_training(module: nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Bring a module and its optimizer into the state that ``training_tensors`` took."""
    if not all_finite(tensors.values()):
        must, got = "a checkpoint must hold finite numbers", "NaN or infinite ones"
        raise RunError(sentence(must, got, _AGAIN))
    parts = tuple(f"{name}." for name, _ in module.named_children())
    load_strictly(module, {key: value for key, value in tensors.items() if key.startswith(parts)})
    content = optimizer.state_dict()
    content["state"] = {}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for key, value in tensors.items():
        if key.startswith("optimizer."):
            _, index, name = key.split(".", 2)
            if not index.isdecimal() or int(index) >= len(parameters):
                raise ValueError(f"a state of weight {index!r:.40} where there are {len(parameters)}")
            like = parameters[int(index)]
            shape = torch.Size() if name == _STEP else like.shape
            if (value.shape, value.dtype) != (shape, like.dtype):
                got = f"a state of {value.dtype} and shape {tuple(value.shape)}"
                raise ValueError(f"{got} for a weight of {like.dtype} and shape {tuple(like.shape)}")
            # In memory as the weight lies there: a vector unit rounds its last elements otherwise than the rest.
            laid = value if name == _STEP else torch.empty_like(like).copy_(value)
            content["state"].setdefault(int(index), {})[name] = laid
    names = {_MOMENTUM} if isinstance(optimizer, torch.optim.SGD) else {_STEP, "exp_avg", "exp_avg_sq"}
    for index, found in content["state"].items():
        if set(found) != names:
            raise ValueError(f"other states of weight {index} than {', '.join(sorted(names))}")
    optimizer.load_state_dict(content)


@contextmanager
def restoring() -> Iterator[None]:
    """Say in a sentence that what was read from a checkpoint does not fit."""
    try:
        yield
    except LopsidedError:
        raise
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RuntimeError) as error:
        raise RunError(sentence(_FIT, f"another one ({reason(error)})", _AGAIN)) from error


def load_strictly(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Load weights that must fit, also in the kind of their numbers: torch would round them without a word."""
    for key, value in module.state_dict().items():
        if key in tensors and tensors[key].dtype != value.dtype:
            got = f"{tensors[key].dtype} for the {value.dtype} of {key}"
            raise RunError(sentence(_FIT, got, _AGAIN))
    try:
        module.load_state_dict(dict(tensors))
    except RuntimeError as error:
        raise RunError(sentence(_FIT, "weights of another model", _AGAIN)) from error
