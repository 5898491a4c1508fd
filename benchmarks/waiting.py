"""How threads of torch should wait for each other: an MLP and convolutions in training, on a busy machine or not.

    python benchmarks/waiting.py [--busy]     adds to benchmarks/records/waiting.json

OpenMP reads its settings once, so each policy has a process of its own. The processes take turns, and those that wait
are stopped, because threads of the policy "active" never sleep. With ``--busy``, as many endless loops run beside them
as there are cores. The record holds the median seconds of each, its ratio to "default", the load of the machine before,
and the OpenMP library of torch.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lopsided import files

RECORD = Path(__file__).parent / "records" / "waiting.json"
POLICIES = {
    "default": {},
    "passive": {"OMP_WAIT_POLICY": "passive"},
    "active": {"OMP_WAIT_POLICY": "active"},
    "short spin": {"GOMP_SPINCOUNT": "10000"},
}
JOBS = ("mlp", "convolutions")
ROUNDS = 11


def jobs() -> dict[str, Callable[[], None]]:
    """Return what is timed: some steps of an MLP and of convolutions."""
    import torch
    from torch import nn

    torch.manual_seed(0)

    def training(model: nn.Module, x: torch.Tensor, steps: int) -> Callable[[], None]:
        optimizer = torch.optim.Adam(model.parameters())
        y = torch.arange(len(x)) % 2

        def run() -> None:
            for _ in range(steps):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()

        return run

    mlp = nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 2))
    layers = [
        nn.Conv2d(3, 32, 3, 2),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, 2),
        nn.ReLU(),
        nn.Conv2d(64, 128, 3, 2),
        nn.ReLU(),
    ]
    convolutions = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 2))
    return {
        "mlp": training(mlp, torch.rand(128, 784), 20),
        "convolutions": training(convolutions, torch.rand(16, 3, 64, 64), 4),
    }


def work() -> None:
    """Run the jobs that are named on standard input, and print their seconds."""
    made = jobs()
    for run in made.values():
        run()
    print("ready", flush=True)
    for line in sys.stdin:
        begin = time.perf_counter()
        made[line.strip()]()
        print(time.perf_counter() - begin, flush=True)


def openmp() -> str:
    """Return the file of the OpenMP library that torch loads."""
    import torch

    del torch
    lines = Path("/proc/self/maps").read_text().splitlines()
    return ", ".join(sorted({Path(line.split()[-1]).name for line in lines if "omp" in Path(line.split()[-1]).name}))


def _loop() -> None:
    while True:
        pass


def main() -> None:
    """Measure and add to the record."""
    state = "busy" if "--busy" in sys.argv else "as it is"
    load, threads = os.getloadavg()[0], os.cpu_count() or 1
    command = [sys.executable, __file__, "work"]
    workers = {}
    for name, variables in POLICIES.items():
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("OMP_", "GOMP_"))}
        environment |= {"OMP_NUM_THREADS": str(threads), **variables}
        pipe = subprocess.PIPE
        workers[name] = subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True)
    loops = [multiprocessing.Process(target=_loop, daemon=True) for _ in range(threads * (state == "busy"))]
    seconds: dict[str, dict[str, list[float]]] = {job: {name: [] for name in workers} for job in JOBS}
    try:
        for worker in workers.values():
            assert worker.stdout is not None
            assert worker.stdout.readline() == "ready\n"
            worker.send_signal(signal.SIGSTOP)
        for loop in loops:
            loop.start()
        for turn in range(ROUNDS):
            order = list(workers) if turn % 2 else list(reversed(workers))
            for job, times in seconds.items():
                for name in order:
                    times[name].append(_timed(workers[name], job))
    finally:
        for ended in (*workers.values(), *(loop for loop in loops if loop.is_alive())):
            ended.kill()
    found: dict[str, Any] = {"openmp": openmp(), "threads": threads, "load_before": round(load, 1), "rounds": ROUNDS}
    for job, times in seconds.items():
        middle = {name: statistics.median(values) for name, values in times.items()}
        ratios = {name: round(value / middle["default"], 2) for name, value in middle.items()}
        found[job] = {"seconds": {name: round(value, 4) for name, value in middle.items()}, "ratio": ratios}
        print(f"{job:12} {state}", ratios, f"{middle['default']:.3f} s, load {load:.1f}")
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    files.atomic_write(RECORD, json.dumps({**record, state: found}, indent=1) + "\n")


def _timed(worker: subprocess.Popen[str], job: str) -> float:
    assert worker.stdin is not None
    assert worker.stdout is not None
    worker.send_signal(signal.SIGCONT)
    worker.stdin.write(f"{job}\n")
    worker.stdin.flush()
    seconds = float(worker.stdout.readline())
    worker.send_signal(signal.SIGSTOP)
    return seconds


if __name__ == "__main__":
    work() if sys.argv[1:] == ["work"] else main()
