"""The tracker ``wandb``: runs of Weights & Biases. Needs the extra ``wandb``.

Without a login, it writes offline runs, which need no account and no network; ``wandb sync`` sends them later. With a
login of the user, or as WANDB_MODE says, runs go to the user's own account. Account, project and server only come from
W&B's own settings and variables: a recipe of someone else must not be able to send figures elsewhere.

Runs go to ``FOLDER/wandb`` with ``wandb:FOLDER``. Without a place, WANDB_DIR decides, or else the current folder.
"""

from __future__ import annotations

import netrc
import os
import re
import secrets
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from lopsided.trackers.tracker import Status, TrackedRun, Tracker, quiet

PROJECT = "lopsided"
"""The name of the project, unless WANDB_PROJECT gives another."""
_EXIT = {"finished": 0, "failed": 1, "interrupted": 255}
"""W&B knows a run that was interrupted by this exit code."""
_VARIABLES = {
    "WANDB_ERROR_REPORTING": "false",  # lopsided needs no network.
    "WANDB_FINISH_TIMEOUT": "300",  # A network that is gone must not hold up a run; what is left stays on the disk.
}


class WandB(Tracker):
    """Writes config, history, summary and files of W&B. Folds and cells of a sweep form a group with their parent."""

    needs = ("wandb",)
    install = "lopsided[wandb]"
    _run: Any = None

    @classmethod
    def settle(cls, place: str | None) -> str | None:
        """Return an absolute path, or None if W&B's own variable decides."""
        if place is None and os.environ.get("WANDB_DIR"):
            return None
        return os.path.abspath(place or ".")

    def start(self, run: TrackedRun) -> str:
        """Create a run, or continue the run with this key.

        ``wandb sync`` replaces a run by a later offline run with the same id. So a run that continues offline gets all
        its epochs again, and the folder that it replaces is removed unless it was sent already.
        """
        for name, value in _VARIABLES.items():
            os.environ.setdefault(name, value)
        folder = Path(self.place or os.environ.get("WANDB_DIR") or ".")
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):  # W&B would take a temporary folder instead.
            raise PermissionError(f"{folder} cannot be written")
        known = run.key if run.key is not None and re.fullmatch(r"[0-9a-f]{8}", run.key) else None
        name = known or secrets.token_hex(4)
        if known is not None:
            _remove_replaced(folder, known)
        with quiet():
            import wandb

            mode: Any = _mode(wandb.setup().settings)
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT") or PROJECT,
                dir=str(folder),
                id=name,
                name=run.name,
                config=_nested({**run.parameters, "folder": str(run.folder)}),
                resume=None if mode == "offline" else "allow",
                reinit="create_new",  # A run with folds is open while its folds are.
                mode=mode,
                settings=wandb.Settings(silent=True, console="off"),
                **_place_in_group(run, name),
            )
            self.repeat(run.history)
        return name

    def recall(self, step: int, split: str, recall: Mapping[str, float]) -> None:
        """Write the recall of each class: to the history for validation images, to the summary for others."""
        if split == "val":
            super().recall(step, split, recall)
        else:
            self._summarise({f"{split}_recall/{name}": value for name, value in recall.items()})

    def artifacts(self, paths: Sequence[Path]) -> None:
        """Copy the files into the folder of the run."""
        with quiet():
            for path in paths:
                copy = Path(self._run.dir) / path.name
                shutil.copyfile(path, copy)
                self._run.save(str(copy), base_path=self._run.dir, policy="now")

    def end(self, step: int, status: Status, figures: Mapping[str, float]) -> None:
        """Write the results to the summary, and the status."""
        self._summarise(figures)
        with quiet():
            self._run.finish(exit_code=_EXIT[status])

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Write a step. A run that continues online already has the steps before its own."""
        if step >= self._run.step:
            with quiet():
                self._run.log(dict(figures), step=step)

    def _summarise(self, figures: Mapping[str, float]) -> None:
        with quiet():
            self._run.summary.update(dict(figures))


def _remove_replaced(folder: Path, name: str) -> None:
    """Remove the offline runs that a run replaces. W&B names a folder by the second, so it must be gone before."""
    for found in folder.glob(f"*wandb/offline-run-*-{name}"):
        if not any(found.glob("*.synced")):
            shutil.rmtree(found, ignore_errors=True)


def _place_in_group(run: TrackedRun, name: str) -> dict[str, Any]:
    """Return group and type. A parent and its children have the same group; a run without children has none."""
    if run.parent_folder is not None and run.parent is not None:
        kind = "fold" if run.folder.parent.name == "folds" else "cell"
        return {"group": f"{run.parent_folder.name} {run.parent}", "job_type": kind}
    if not run.recipe:
        return {"group": f"{run.name} {name}", "job_type": "sweep"}
    if run.parameters.get("data.folds") is not None:
        return {"group": f"{run.name} {name}", "job_type": "folds"}
    return {}


def _nested(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields by their dotted names as a tree, as W&B shows a config.

    >>> _nested({"encoder.name": "mlp", "track": ("wandb",)})
    {'encoder': {'name': 'mlp'}, 'track': ['wandb']}
    """
    tree: dict[str, Any] = {}
    for path, value in parameters.items():
        *above, last = path.split(".")
        inner = tree
        for part in above:
            inner = inner.setdefault(part, {})
        inner[last] = list(map(_plain, value)) if isinstance(value, tuple | list) else _plain(value)
    return tree


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, str | int | float) else str(value)


def _mode(settings: Any) -> str:
    """Return the mode that the user chose, or offline if nobody is logged in, because W&B would ask for a login."""
    chosen = "WANDB_MODE" in os.environ or settings.mode != "online"
    return str(settings.mode) if chosen or _has_login(settings.base_url) else "offline"


def _has_login(address: str) -> bool:
    """Whether W&B finds the login of a user: in its variables, or in the file that ``wandb login`` writes."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    own = os.environ.get("NETRC")
    for path in (own,) if own else ("~/.netrc", "~/_netrc"):
        try:
            if urlsplit(address).hostname in netrc.netrc(os.path.expanduser(path)).hosts:
                return True
        except (OSError, netrc.NetrcParseError, UnicodeDecodeError):
            continue
    return False
