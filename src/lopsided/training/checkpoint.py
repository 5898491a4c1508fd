"""The state of an unfinished run, from which the run can continue with the same result.

``checkpoint/state.safetensors`` holds the weights and the optimizer's state. Its header holds the rest as JSON. It is
one file, so that a single rename replaces the state. ``chosen-STAGE-EPOCH.safetensors`` holds the best weights of the
stage so far, and ``encoder.safetensors`` the encoder of a finished first stage. Weight files that the state does not
name were left by a killed process and are removed. A finished run keeps only the header.

The state is written after the first epoch. Later it is written after an epoch only if the last write took at most a
twentieth of the time since then. So writing stays cheap even if epochs are short. A process that is asked to stop
finishes its step and writes the state in the middle of the epoch (``Midway``).
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

from lopsided.errors import LopsidedError, RunError, sentence
from lopsided.files import atomic_write, check_regular, make_folder, reading_tensors, reason, remove_leftovers
from lopsided.models.model import all_finite
from lopsided.ranks import ALONE, Ranks

FORMAT = 1
FOLDER_NAME, STATE_NAME, ENCODER_NAME = "checkpoint", "state.safetensors", "encoder.safetensors"
TIMES_AS_LONG = 20.0
"""Least seconds of training per second of writing."""
_KEY = "lopsided"
_STAGE = re.compile(r"[a-z][a-z0-9_-]{0,99}")
_CHOSEN = re.compile(r"chosen-[a-z0-9_-]+-\d+\.safetensors")
_STEP, _MOMENTUM = "step", "momentum_buffer"
_FIT = "The checkpoint does not fit the recipe"
_AGAIN = "Remove the checkpoint folder to start again."


Facts = dict[str, float | int | str | list[float | None] | None]
"""What the log says about an epoch."""


@dataclass
class State:
    """The progress of a run: ``epoch`` epochs of ``stage`` are done, and ``step`` steps of the next epoch."""

    recipe: str
    data: str
    stage: str
    epoch: int = 0
    selection: dict[str, Any] = field(default_factory=dict)
    history: list[Facts] = field(default_factory=list)
    chosen: str | None = None
    step: int = 0
    finished: bool = False
    seconds: float = 0.0
    steps: int | None = None
    """The number of steps of a stage whose budget is in minutes. It is settled once."""
    cautions: list[dict[str, Any]] = field(default_factory=list)
    """The cautions that training has given so far, as JSON. What gave them may not run again after a resume."""
    threads: int = 1
    ranks: int = 1
    fast: bool = True
    torch: str = torch.__version__
    format: int = FORMAT


class Checkpoint:
    """The checkpoint of a run folder. Without a folder, nothing is written.

    If there are several ranks, only the first one reads and writes files. It sends the content to the others.
    """

    def __init__(self, folder: Path | None, ranks: Ranks = ALONE) -> None:
        self.folder = None if folder is None else folder / FOLDER_NAME
        self.ranks = ranks
        self._last: State | None = None
        self._saved, self._cost, self._beside = -math.inf, 0.0, 0.0

    def due(self) -> bool:
        """Return whether a new state should be written, given how long the last write took."""
        if self.folder is None:
            return False
        due: bool = self.ranks.told(lambda: perf_counter() - self._saved >= self._cost * TIMES_AS_LONG)
        return due

    def exists(self) -> bool:
        """Return whether a state was written."""
        return self.folder is not None and (self.folder / STATE_NAME).exists()

    def save(self, state: State, tensors: Mapping[str, Tensor]) -> None:
        """Write ``state`` and its tensors, and remove weight files that are no longer needed."""
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
        """Remove weight files that the state does not name, and temporary files of a killed process."""
        if self.folder is None or not self.ranks.first:
            return
        kept = set() if state.finished else {state.chosen, ENCODER_NAME if state.stage == "classifier" else None}
        for path in self.folder.iterdir():
            if path.name not in kept and (path.name == ENCODER_NAME or _CHOSEN.fullmatch(path.name)):
                with suppress(OSError):
                    path.unlink()
        remove_leftovers(self.folder)

    def save_weights(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Write weights to a file of their own. The state that is saved next must name this file."""
        if self.folder is not None and self.ranks.first:
            begin = perf_counter()
            self._write(name, tensors, "{}")
            self._beside += perf_counter() - begin

    def load(self) -> tuple[State, dict[str, Tensor]] | None:
        """Read the state and its tensors. Return None if there is no state."""
        if not self.ranks.told(self.exists):
            return None
        tensors, text = self._read(STATE_NAME)
        try:
            content = json.loads(text)
            if content["format"] != FORMAT:
                got = f"format {content['format']!r:.80}"
                raise RunError(sentence(f"{self.folder} must have format {FORMAT}", got, _AGAIN))
            state = TypeAdapter(State).validate_python(content)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise RunError(f"{self.folder} does not hold the state of a run. {_AGAIN}") from error
        odd = next(_odd_fields(state), None)
        if odd is not None:
            got = f"{odd} = {getattr(state, odd)!r:.40}"
            raise RunError(f"{self.folder} does not hold the state of a run: {got} is not possible. {_AGAIN}")
        self._last = State(**asdict(state))
        return state, tensors

    def load_weights(self, name: str) -> dict[str, Tensor]:
        """Read weights that the state names."""
        return self._read(name)[0]

    def last_good(self) -> str:
        """Return a sentence that names the checkpoint from which a failed run can continue."""
        if self.folder is None:
            return "There is no checkpoint, because no folder was given."
        if self._last is None:
            return "There is no checkpoint yet."
        step = f"step {self._last.step} after " if self._last.step else ""
        after = f"after {step}epoch {self._last.epoch} of stage {self._last.stage}"
        return f"The last good checkpoint is {self.folder / STATE_NAME}, {after}."

    def _write(self, name: str, tensors: Mapping[str, Tensor], text: str) -> None:
        from safetensors.torch import save

        assert self.folder is not None
        make_folder(self.folder)
        # Only one metadata key: the order of several keys would differ between processes.
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
                tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  It is not a mapping.
                return tensors, (file.metadata() or {}).get(_KEY, "")
        except OSError as error:
            raise RunError(f"{path} cannot be read ({reason(error)}). {_AGAIN}") from error
        except ValueError as error:
            raise RunError(f"{path} is not a complete safetensors file ({error}). {_AGAIN}") from error


def _odd_fields(state: State) -> Iterator[str]:
    """Yield fields with values that no run writes. A folder may come from someone else, so its content is checked."""
    lists = {name for line in state.history for name, value in line.items() if isinstance(value, list)}
    good = {
        "stage": _STAGE.fullmatch(state.stage),
        "epoch": state.epoch >= 0,
        "step": 0 <= state.step < 2**63,
        "history": lists <= {"val_recall"},  # All other values of an epoch are single.
        "chosen": state.chosen is None or _CHOSEN.fullmatch(state.chosen),  # It names a file that will be read.
        "seconds": 0 <= state.seconds < math.inf,
        "steps": state.steps is None or 1 <= state.steps < 2**63,
        "threads": 1 <= state.threads < 2**31,
        "ranks": 1 <= state.ranks < 2**31,
    }
    yield from (name for name, is_good in good.items() if not is_good)


def check_course(state: State, tensors: Mapping[str, Tensor], epochs: Mapping[str, int]) -> None:
    """Raise if no run with these stages and these numbers of ``epochs`` can reach the state."""
    got = ""
    if state.stage not in epochs:
        got = f"it is in stage {state.stage}"
    elif state.epoch > epochs[state.stage]:
        got = f"it is at epoch {state.epoch!r:.40} of {epochs[state.stage]} in stage {state.stage}"
    elif state.step and state.epoch == epochs[state.stage]:
        got = f"it is in the middle of an epoch after the last one, {state.epoch}"
    elif (state.epoch or state.step) and not tensors and not state.finished:
        got = f"it holds no weights after epoch {state.epoch}"
    elif not _is_history(state, epochs):
        got = f"its history does not match epoch {state.epoch} of stage {state.stage}"
    if got:
        raise RunError(f"{_FIT}: {got}. {_AGAIN}")


def _is_history(state: State, epochs: Mapping[str, int]) -> bool:
    """Return whether the history has one line per epoch up to the state. Earlier stages may have stopped early."""
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
    """Return all tensors of a module and of its optimizer, by name."""
    tensors = dict(module.state_dict())
    for index, values in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{index}.{k}": v for k, v in values.items() if isinstance(v, Tensor)}
    return tensors


def restore_training(module: nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Load the result of ``training_tensors`` into a module and its optimizer."""
    if not all_finite(tensors.values()):
        raise RunError(f"The checkpoint holds NaN or infinite numbers. {_AGAIN}")
    parts = tuple(f"{name}." for name, _ in module.named_children())
    load_strictly(module, {key: value for key, value in tensors.items() if key.startswith(parts)})
    content = optimizer.state_dict()
    content["state"] = {}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for key, value in tensors.items():
        if key.startswith("optimizer."):
            _, index, name = key.split(".", 2)
            if not index.isdecimal() or int(index) >= len(parameters):
                raise ValueError(f"optimizer state for weight {index!r:.40}, but there are {len(parameters)} weights")
            like = parameters[int(index)]
            shape = torch.Size() if name == _STEP else like.shape
            if (value.shape, value.dtype) != (shape, like.dtype):
                got = f"optimizer state of {value.dtype} and shape {tuple(value.shape)}"
                raise ValueError(f"{got} for a weight of {like.dtype} and shape {tuple(like.shape)}")
            # Use the memory layout of the weight: SIMD code may round the last elements differently from the rest.
            laid = value.clone() if name == _STEP else torch.empty_like(like).copy_(value)
            content["state"].setdefault(int(index), {})[name] = laid
    names = {_MOMENTUM} if isinstance(optimizer, torch.optim.SGD) else {_STEP, "exp_avg", "exp_avg_sq"}
    for index, found in content["state"].items():
        if set(found) != names:
            raise ValueError(f"the optimizer state of weight {index} must be {', '.join(sorted(names))}")
    optimizer.load_state_dict(content)


@contextmanager
def restoring() -> Iterator[None]:
    """Turn errors inside the block into a RunError: the content of the checkpoint does not fit."""
    try:
        yield
    except LopsidedError:
        raise
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RuntimeError) as error:
        raise RunError(f"{_FIT}: {reason(error)}. {_AGAIN}") from error


def load_strictly(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Load weights into a module. Names, shapes and dtypes must match; torch alone would convert dtypes silently."""
    for key, value in module.state_dict().items():
        if key in tensors and tensors[key].dtype != value.dtype:
            got = f"{key} is {tensors[key].dtype}, not {value.dtype}"
            raise RunError(f"{_FIT}: {got}. {_AGAIN}")
    try:
        module.load_state_dict(dict(tensors))
    except RuntimeError as error:
        raise RunError(f"{_FIT}: it holds the weights of another model. {_AGAIN}") from error


_PREFIX, _SUM, _RANDOM = "midway.", "sum.", "random."


class Midway:
    """What the ranks have after some steps of an epoch, by name. ``tensors`` are those of a checkpoint.

    All ranks have the same weights then. Each has its own sums over the epoch, its own random numbers, and, unless they
    are synchronised, its own running statistics of batch norm. A checkpoint holds those of all ranks, one row each. If
    another number of ranks continues, they begin with the sum of the sums and the mean of the statistics, and draw new
    random numbers.
    """

    def __init__(self, tensors: Mapping[str, Tensor], ranks: Ranks) -> None:
        own = {key.removeprefix(_PREFIX): rows for key, rows in tensors.items() if key.startswith(_PREFIX)}
        self._rows = {key: rows for key, rows in own.items() if not key.startswith(_RANDOM)}
        self._states = {key.removeprefix(_RANDOM): rows for key, rows in own.items() if key.startswith(_RANDOM)}
        self.ranks = ranks

    @property
    def is_exact(self) -> bool:
        """Whether the ranks that continue are as many as those that stopped."""
        return all(len(rows) == self.ranks.size for rows in self._states.values())

    def check(self, values: Mapping[str, Tensor], device: torch.device) -> None:
        """Raise if these values cannot be restored."""
        for name, value in values.items():
            rows = self._rows[name]
            if not len(rows) or (rows.shape[1:], rows.dtype) != (value.shape, value.dtype):
                raise ValueError(f"{name} in the middle of the epoch has another shape or dtype")
        for kind in _random_states(device):
            generator = torch.Generator(device if kind == "cuda" else "cpu")
            for state in self._states[kind]:
                generator.set_state(state.clone())  # torch ignores where a part of a tensor begins.

    def restore(self, values: Mapping[str, Tensor]) -> None:
        """Copy the state of this rank into ``values``, and into the generators of random numbers."""
        for name, value in values.items():
            rows = self._rows[name].to(value.device)
            if self.is_exact:
                value.copy_(rows[self.ranks.rank])
            elif name.startswith(_SUM):
                value.copy_(rows.sum(0) * (1 if self.ranks.first else 0))
            else:
                value.copy_(rows.mean(0) if value.is_floating_point() else rows.amax(0))
        if self.is_exact:
            for kind, rows in self._states.items():
                set_state = torch.cuda.set_rng_state if kind == "cuda" else torch.set_rng_state
                set_state(rows[self.ranks.rank].clone())


def summed(name: str) -> str:
    """Return the name under which a sum over the epoch is kept, of which each rank has a part."""
    return f"{_SUM}{name}"


def midway_tensors(values: Mapping[str, Tensor], ranks: Ranks, device: torch.device) -> dict[str, Tensor]:
    """Return ``values`` and the states of the generators on all ranks, for a checkpoint."""
    states = {f"{_RANDOM}{kind}": state for kind, state in _random_states(device).items()}
    everything = {**values, **states}
    sizes = [1] * ranks.size
    return {f"{_PREFIX}{name}": ranks.gather(value[None], sizes).clone() for name, value in everything.items()}


def _random_states(device: torch.device) -> dict[str, Tensor]:
    states = {"cpu": torch.default_generator.get_state()}
    return states | ({"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {})
