"""An engine that computes cells on a running Ray cluster. Needs the extra ``ray``."""

from __future__ import annotations

import importlib
import importlib.util
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import Any

from lopsided import __version__, files
from lopsided.errors import InputError, MissingDependencyError, sentence
from lopsided.runs.engines import LOST, Ended
from lopsided.runs.folder import METRICS
from lopsided.runs.plan import Cell, train_cell
from lopsided.runs.records import Record

CONNECT_SECONDS = 20.0
"""How long to wait for a cluster to answer. Ray itself would keep trying for minutes."""

_PROBE = """
import ray, sys
print(flush=True)  # The import is done: the time limit for the cluster starts here.
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
"""
_START = "Start a cluster with `ray start --head` and use the address that it prints."


class RayEngine:
    """One task with ``threads`` cores per cell, spread over the nodes of an existing cluster.

    ``address`` is the address of the cluster's head, such as ``"10.0.0.5:6379"``, or ``"auto"`` for the cluster of this
    machine. Every node needs this version of lopsided, either installed or in the ``PYTHONPATH`` of the node's ``ray
    start``. If the process has already called ``ray.init``, for example with the ``runtime_env``
    ``{"py_modules": [lopsided]}``, that connection is used. Sources and weights need the same path on every node. Cells
    use no GPU.

    A node that can access the sweep's folder trains in that folder. If the node dies, the cell continues from its
    checkpoint on another node. A node without access sends back the files of a finished run; if it dies, the cell
    starts again. The engine sends no usage statistics to Ray's developers. The cluster has its own setting for this.
    """

    def __init__(self, address: str = "auto", threads: int = 1) -> None:
        if threads < 1:
            raise InputError(sentence("threads must be >= 1", threads))
        check_installed("ray")
        self.address, self.threads = address, threads
        self._folder, self._marker, self._models = Path(), Path(), False
        self._running: dict[Any, Cell] = {}
        self._closing = ExitStack()
        self._task: Any = None

    def open(self, folder: Path, *, models: bool = False) -> None:
        """Connect, and write a marker file, by which a node recognises that it can access the folder."""
        connect(self.address, self._closing)
        ray = _ray()
        most = max((_cores(node) for node in ray.nodes()), default=0)
        if most < self.threads:
            self.close()
            must = f"threads must be at most the cores of the cluster's largest node, {most}"
            raise InputError(sentence(must, self.threads))
        self._folder, self._models = folder.absolute(), models
        self._marker = self._folder / f".seen-{uuid.uuid4().hex}"
        files.atomic_write(self._marker, "")
        self._closing.callback(self._marker.unlink, missing_ok=True)
        # The sweep retries lost workers, not Ray: it records the failure and waits until the folder is free.
        options = {"num_cpus": self.threads, "max_retries": 0, "scheduling_strategy": "SPREAD"}
        self._task = ray.remote(**options)(_portable_task())

    @property
    def slots(self) -> int:
        """How many cells the live nodes can compute at once."""
        return max(1, sum(_cores(node) // self.threads for node in _ray().nodes()))

    def submit(self, cell: Cell) -> None:
        """Start a cell on some node."""
        where = (str(self._folder / cell.path), str(self._marker))
        ref = self._task.remote(__version__, cell.recipe.to_toml(), *where, self.threads, self._models)
        self._running[ref] = cell

    def wait(self, seconds: float) -> list[Ended]:
        """Return the cells that ended, after writing the files that nodes sent."""
        if not self._running:
            time.sleep(seconds)
            return []
        ray, refs = _ray(), list(self._running)
        if not ray.wait(refs, timeout=seconds)[0]:
            return []
        done, _ = ray.wait(refs, num_returns=len(refs), timeout=0)
        return [self._collect(ref, self._running.pop(ref)) for ref in done]

    def close(self) -> None:
        """Cancel running cells and disconnect from the cluster."""
        for ref in self._running:
            with suppress(Exception):  # The task may have ended.
                _ray().cancel(ref, force=True)
        self._running = {}
        self._closing.close()

    def _collect(self, ref: Any, cell: Cell) -> Ended:
        ray = _ray()
        folder = self._folder / cell.path
        try:
            line, error, content = ray.get(ref)
        except ray.exceptions.RayTaskError as raised:
            reason = " ".join(str(raised.cause).split())
            return Ended(cell, error=f"an unexpected error occurred ({type(raised.cause).__name__}: {reason}).")
        except ray.exceptions.RayError as lost:  # The worker, its node or its result is lost.
            _drop_lock_of_other_host(folder)
            return Ended(cell, error=f"{LOST} Ray reports {type(lost).__name__}.", died=True)
        if content:
            files.make_folder(folder)
            for name in sorted(content, key=lambda name: name == METRICS):  # Last: it marks a finished run.
                files.atomic_write(folder / name, content[name])
        return Ended(cell, Record.from_json(line) if line else None, error)


def check_installed(*packages: str) -> None:
    """Raise an error if a package that Ray engines need is missing."""
    for name in packages:
        if importlib.util.find_spec(name) is None:
            do = "Run pip install 'lopsided[ray]'."
            raise MissingDependencyError(f"--engine ray needs the package {name}, which is not installed. {do}")


def connect(address: str, closing: ExitStack) -> None:
    """Connect to a cluster until ``closing`` is closed, unless the process is connected already."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray = _ray()
    if ray.is_initialized():
        return
    _probe(address)
    closing.enter_context(redirect_stdout(sys.stderr))  # Ray prints on stdout when a node dies.
    with _kept_sigterm():
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    closing.callback(ray.shutdown)


@contextmanager
def _kept_sigterm() -> Iterator[None]:
    """Restore the handler of SIGTERM, which Ray replaces. Only the main thread can set handlers."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, before)


def _ray() -> Any:
    return importlib.import_module("ray")


def _portable_task() -> Any:
    """Return the task of a node. Ray sends a nested function as code, so it can report that lopsided is missing."""

    def task(version: str, *arguments: Any) -> tuple[str, str, dict[str, bytes]]:
        try:
            import lopsided
        except ImportError:
            found = "none"
        else:
            found = lopsided.__version__
        if found != version:
            import socket

            do = "Install it there, or add it to the node's PYTHONPATH."
            return "", f"every node must have lopsided {version}, got {found} on {socket.gethostname()}. {do}", {}
        from lopsided.runs.engines.ray_engine import train_on_node

        return train_on_node(*arguments)

    return task


def train_on_node(
    recipe: str, folder: str, marker: str, threads: int, models: bool
) -> tuple[str, str, dict[str, bytes]]:
    """Train a cell in its folder. If the node cannot access it, train in a temporary one and return its files."""
    if Path(marker).exists():
        return *train_cell(recipe, folder, threads), {}
    with tempfile.TemporaryDirectory(prefix="lopsided-") as scratch:
        run = Path(scratch) / "run"
        line, error = train_cell(recipe, str(run), threads)
        paths = [path for path in run.glob("[!.]*") if path.is_file() and not error]
        return line, error, {path.name: path.read_bytes() for path in paths if models or path.stem != "model"}


def _probe(address: str) -> None:
    """Raise an error if no cluster answers. A subprocess connects, because Ray has no time limit."""
    host, _, port = address.rpartition(":")
    try:
        if port.isdigit() and host not in ("localhost", "127.0.0.1") and "/" not in host:
            socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS).close()
        reason = _asked(address)
        if reason is None:
            return
    except (OSError, ValueError, OverflowError) as error:
        reason = f"no cluster answers ({error})"
    raise InputError(f"Cannot connect to a Ray cluster at {address}: {reason}. {_START}")


def _asked(address: str) -> str | None:
    """Connect to a cluster from a subprocess. Return why that failed, or None if it succeeded."""
    command = [sys.executable, "-c", _PROBE, address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            process.stdout.readline()
            _, errors = process.communicate(timeout=CONNECT_SECONDS)
        except subprocess.TimeoutExpired:
            return "no cluster answers"
        finally:
            process.kill()  # Has no effect if the process has ended.
    if process.returncode == 0:
        return None
    return f"Ray reports: {(errors.strip().splitlines() or ['nothing'])[-1].rstrip('.')}"


def _cores(node: dict[str, Any]) -> int:
    return int(node["Resources"].get("CPU", 0)) if node["Alive"] else 0


def _drop_lock_of_other_host(folder: Path) -> None:
    """Remove the lock of a lost node. Other machines cannot check that its process has ended; Ray can."""
    path = folder / files.LOCK_NAME
    with suppress(OSError, ValueError, KeyError, TypeError):
        if json.loads(path.read_bytes())["host"] != socket.gethostname():
            path.unlink()
