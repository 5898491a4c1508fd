"""How threads of torch should wait for each other: an MLP and a small ResNet in training, alone and beside other work.

    python benchmarks/waiting.py     writes benchmarks/records/waiting.json

OpenMP reads its settings once, so each policy has a process of its own. The processes take turns, and those that wait
are stopped, because threads of the policy "active" never sleep. "busy" has as many endless loops beside them as there
are cores. The record holds the median seconds of each, its ratio to "default", the load of the machine before, and the
OpenMP library of torch.
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

from lopsided import files

RECORD = Path(__file__).parent / "records" / "waiting.json"
POLICIES = {
    "default": {},
    "passive": {"OMP_WAIT_POLICY": "passive"},
    "active": {"OMP_WAIT_POLICY": "active"},
    "short spin": {"GOMP_SPINCOUNT": "10000"},
}
ROUNDS = {"idle": 9, "busy": 9}


def jobs() -> dict[str, Callable[[], None]]:
    """Return what is timed: an epoch of an MLP, and steps of a small ResNet."""
    import timm
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
    resnet = timm.create_model("resnet10t", num_classes=2)
    return {"mlp": training(mlp, torch.rand(128, 784), 40), "resnet10t": training(resnet, torch.rand(16, 3, 64, 64), 3)}


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
    """Measure and write the record."""
    load, threads = os.getloadavg()[0], str(os.cpu_count())
    workers = {}
    for name, variables in POLICIES.items():
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("OMP_", "GOMP_"))}
        environment |= {"OMP_NUM_THREADS": threads, **variables}
        command = [sys.executable, __file__, "work"]
        workers[name] = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert workers[name].stdout.readline() == "ready\n"
        workers[name].send_signal(signal.SIGSTOP)
    found: dict[str, dict[str, dict[str, list[float]]]] = {}
    try:
        for state, rounds in ROUNDS.items():
            loops = [
                multiprocessing.Process(target=_loop, daemon=True) for _ in range(int(threads) * (state == "busy"))
            ]
            for loop in loops:
                loop.start()
            found[state] = {job: {name: [] for name in workers} for job in ("mlp", "resnet10t")}
            for turn in range(rounds):
                order = list(workers) if turn % 2 else list(reversed(workers))
                for job, times in found[state].items():
                    for name in order:
                        times[name].append(_timed(workers[name], job))
            for loop in loops:
                loop.kill()
    finally:
        for worker in workers.values():
            worker.kill()
    record = {"openmp": openmp(), "threads": int(threads), "load_before": round(load, 1), "rounds": ROUNDS}
    for state, by_job in found.items():
        for job, times in by_job.items():
            middle = {name: statistics.median(seconds) for name, seconds in times.items()}
            ratios = {name: round(value / middle["default"], 2) for name, value in middle.items()}
            record[f"{job}, {state}"] = {
                "seconds": {name: round(value, 4) for name, value in middle.items()},
                "ratio": ratios,
            }
            print(f"{job:10} {state:5}", ratios, f"{middle['default']:.3f} s")
    files.atomic_write(RECORD, json.dumps(record, indent=1) + "\n")


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
