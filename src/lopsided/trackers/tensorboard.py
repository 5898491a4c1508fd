"""The tracker ``tensorboard``: event files for TensorBoard. Needs the extra ``tensorboard``.

Without a place, a run writes to its folder ``tensorboard/``, and the folds of a run and the cells of a sweep to
sub-folders of that of the run or sweep. With ``tensorboard:FOLDER``, each run has a folder in FOLDER.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lopsided.trackers.tracker import TENSORBOARD, Status, TrackedRun, Tracker


class TensorBoard(Tracker):
    """Writes scalars and texts for TensorBoard, flushed after each epoch."""

    needs = ("tensorboard",)
    install = "lopsided[tensorboard]"
    _writer: Any = None

    def start(self, run: TrackedRun) -> str:
        """Open an event file. A continued run hides the points after its last epoch, which will come again."""
        from torch.utils.tensorboard import SummaryWriter

        root = Path(self.place) if self.place is not None else (run.parent_folder or run.folder) / TENSORBOARD
        known = _below(root, run.key)
        folder = known or self._new_folder(run, root)
        folder.mkdir(parents=True, exist_ok=True)
        purge = None if known is None else len(run.history) + 1
        self._writer = SummaryWriter(str(folder), purge_step=purge)
        if known is None:
            if run.recipe:
                self._writer.add_text("recipe", f"```toml\n{run.recipe}\n```", 0)
            self.repeat(run.history)
        self._writer.flush()
        return folder.relative_to(root).as_posix()  # Valid after the run folder was moved.

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Write one scalar per figure."""
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def artifacts(self, paths: Sequence[Path]) -> None:
        """Write where the files are, because event files do not hold files."""
        self._writer.add_text("files", "\n".join(f"- `{path}`" for path in paths), 0)

    def end(self, step: int, status: Status, figures: Mapping[str, float]) -> None:
        """Write the results and close the event file."""
        self.log(step, figures)
        self._writer.add_text("status", status, step)
        self._writer.close()

    def _new_folder(self, run: TrackedRun, root: Path) -> Path:
        if self.place is None and run.parent_folder is None:
            return root
        root = _below(root, run.parent) or root
        name = re.sub(r"[^\w.=+-]+", "-", run.name).strip("-.") or "run"
        numbers = (name if number == 1 else f"{name}-{number}" for number in range(1, 1_000_000))
        return next(root / each for each in numbers if not (root / each).exists())


def _below(root: Path, key: str | None) -> Path | None:
    """Return the folder with this key, if it exists. A file of the run folder holds the key, so it must be in root."""
    folder = None if key is None else root / key
    if folder is None or not folder.is_dir() or not folder.resolve().is_relative_to(root.resolve()):
        return None
    return folder
