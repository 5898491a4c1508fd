"""The tracker ``mlflow``: runs in a local MLflow folder, without a server. Needs the extra ``mlflow``.

``mlflow:FOLDER`` writes to a folder of files, ``mlflow:sqlite:///FILE`` to a database, which needs the full package
mlflow. Without a place, MLflow's own variable MLFLOW_TRACKING_URI decides, or else the folder ``mlruns``. The address
of a server can only come from that variable, and a folder or database whose files go to another machine is refused:
what someone else wrote must not be able to send figures away.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from lopsided.errors import InputError, sentence
from lopsided.trackers.tracker import Status, TrackedRun, Tracker, quiet

EXPERIMENT = "lopsided"
"""The name of the experiment, unless MLFLOW_EXPERIMENT_NAME gives another."""
USUAL_FOLDER = "mlruns"
_DATABASE = "sqlite:///"
_STATUS = {"finished": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}
_MOST_AT_ONCE = 100
"""MLflow takes at most this many parameters at once."""
_MOST_CHARACTERS = 500
"""Characters of a parameter; MLflow 2 takes no more."""


class MLflow(Tracker):
    """Writes parameters, metrics and files to MLflow. Folds and cells of a sweep are child runs."""

    needs = ("mlflow",)
    install = "lopsided[mlflow]"

    def __init__(self, place: str | None = None) -> None:
        super().__init__(place)
        self._client: Any = None
        self._run = ""
        self._names: dict[str, str] = {}
        self._there: set[tuple[str, int]] = set()

    @classmethod
    def settle(cls, place: str | None) -> str | None:
        """Return an absolute path, or None if MLflow's own variable decides."""
        if place is None:
            return None if os.environ.get("MLFLOW_TRACKING_URI") else os.path.abspath(USUAL_FOLDER)
        if place.startswith(_DATABASE):
            return _DATABASE + os.path.abspath(place.removeprefix(_DATABASE))
        if "://" in place:
            must = f"the place of the tracker mlflow must be a folder or {_DATABASE}FILE"
            raise InputError(sentence(must, repr(place[:80]), "Set MLFLOW_TRACKING_URI to use a server."))
        return os.path.abspath(place)

    def start(self, run: TrackedRun) -> str:
        """Create a run, or continue the run with this key."""
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # lopsided needs no network.
        with quiet():
            from mlflow.exceptions import MlflowException
            from mlflow.tracking import MlflowClient

            if self.place is not None and not self.place.startswith(_DATABASE):
                # Recent versions ask for a database unless this variable confirms that a folder is wanted. In a folder,
                # each run has files of its own, so that many workers can write at once.
                os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
                Path(self.place).mkdir(parents=True, exist_ok=True)
                self._client = MlflowClient(tracking_uri=Path(self.place).as_uri())
            else:
                self._client = MlflowClient(tracking_uri=self.place)
            if run.key is not None:
                try:
                    self._run = self._client.get_run(run.key).info.run_id
                except MlflowException:  # Someone removed it.
                    self._run = ""
            if self._run:
                self._client.update_run(self._run, status="RUNNING")
                for name in self._client.get_run(self._run).data.metrics:
                    self._there |= {(name, point.step) for point in self._client.get_metric_history(self._run, name)}
            else:
                self._create(run)
            if self.place is not None:
                _check_local(self._client.get_run(self._run).info.artifact_uri)
        self.repeat(run.history)
        return self._run

    def artifacts(self, paths: Sequence[Path]) -> None:
        """Copy the files."""
        with quiet():
            for path in paths:
                self._client.log_artifact(self._run, str(path))

    def end(self, step: int, status: Status, figures: Mapping[str, float]) -> None:
        """Write the results and the status."""
        self.log(step, figures)
        with quiet():
            self._client.set_terminated(self._run, status=_STATUS[status])

    def _create(self, run: TrackedRun) -> None:
        from mlflow.entities import Param

        tags = {"lopsided.folder": str(run.folder)}
        if run.parent is not None:
            tags["mlflow.parentRunId"] = run.parent
        files = None
        if self.place is not None and self.place.startswith(_DATABASE):  # By default they go to the working folder.
            files = (Path(self.place.removeprefix(_DATABASE)).parent / "mlartifacts").as_uri()
        made = self._client.create_run(_experiment(self._client, files), run_name=run.name, tags=tags)
        self._run = made.info.run_id
        texts = {name: "unset" if value is None else str(value) for name, value in run.parameters.items()}
        params = [Param(name, text[:_MOST_CHARACTERS]) for name, text in texts.items()]
        for start in range(0, len(params), _MOST_AT_ONCE):
            self._client.log_batch(self._run, params=params[start : start + _MOST_AT_ONCE])

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Write the points that are not there yet. After a resume, the last epochs may come a second time."""
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        points = [(self._name(name), value) for name, value in figures.items()]
        new = [Metric(name, value, now, step) for name, value in points if (name, step) not in self._there]
        with quiet():
            if new:
                self._client.log_batch(self._run, metrics=new)

    def _name(self, name: str) -> str:
        """Return a name that MLflow takes: it refuses most signs, and names that only differ in them must not merge."""
        if name not in self._names:
            plain = re.sub(r"[^\w\-./ ]", "_", name, flags=re.ASCII)
            plain = "/".join(part.strip(" .") or "_" for part in plain.split("/"))
            taken = set(self._names.values())
            options = (plain if number == 1 else f"{plain}-{number}" for number in range(1, 1_000_000))
            self._names[name] = next(option for option in options if option not in taken)
        return self._names[name]


def _check_local(address: str) -> None:
    """Raise if the files of a run go elsewhere than to the disk of this machine."""
    parts = urlsplit(address)
    if parts.scheme not in ("", "file") or parts.netloc not in ("", "localhost"):
        raise InputError(
            f"its experiment keeps files at {address[:80]}, not on this machine; set MLFLOW_TRACKING_URI to use it"
        )


def _experiment(client: Any, files: str | None) -> str:
    """Return the experiment, which another process may create at the same time. ``files`` is where its files go."""
    from mlflow.exceptions import MlflowException

    name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or EXPERIMENT
    found = client.get_experiment_by_name(name)
    if found is None:
        try:
            return str(client.create_experiment(name, artifact_location=files))
        except MlflowException:
            found = client.get_experiment_by_name(name)
            if found is None:
                raise
    return str(found.experiment_id)
