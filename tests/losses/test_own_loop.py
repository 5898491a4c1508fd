"""The code of docs/own-loop.md runs, and on two ranks it trains as one process does, to the last digits of float64."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close

PAGE = Path(__file__).parents[2] / "docs" / "own-loop.md"
CODE = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), flags=re.DOTALL)
ALONE = next(i for i, block in enumerate(CODE) if "init_process_group" in block)

STEPS = """
def trained(model, criterion, share):
    encoder = getattr(model, "module", model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1)
    x, y = torch.rand(12, 1, 8, 8), torch.arange(12) % 5 % 2
    losses = [step(model, criterion, optimizer, x[share], y[share]).item() for _ in range(3)]
    queue = FeatureQueue(10)
    for _ in range(3):
        losses.append(step_with_queue(model, criterion, optimizer, queue, x[share], y[share]).item())
    z, temperature = encode_views(model, [x[share], x[share] ** 2])
    loss = criterion(z, y[share], temperature=temperature)
    optimizer.zero_grad()
    loss.backward()
    losses.append(loss.item())
    return losses, {name: p.grad.flatten().tolist() for name, p in encoder.named_parameters()}


def new(cls, **options):
    torch.manual_seed(0)
    return cls(**options)
"""
ON_A_RANK = """
found = []
for stop in (6, 7, 10, 12):
    own = slice(0, stop) if dist.get_rank() == 0 else slice(stop, 12)
    found.append(trained(DistributedDataParallel(new(Encoder)), criterion, own))
print(json.dumps(found))
dist.destroy_process_group()
"""


def test_the_page_imports_nothing_of_this_package_but_the_losses() -> None:
    imported = re.findall(r"^\s*(?:from|import) (lopsided[\w.]*)", "\n".join(CODE), flags=re.MULTILINE)
    assert set(imported) == {"lopsided.losses"}


def test_the_code_for_one_process_runs() -> None:
    names: dict[str, Any] = {}
    exec("\n".join(CODE[:ALONE]), names)
    assert names["loss"].isfinite()
    assert len(names["losses"]) == 2
    assert len(names["queue"].reference()[0]) == 24


@pytest.mark.slow
def test_the_code_for_two_ranks_trains_as_one_process_does() -> None:
    """Shares of 6 and 6, 7 and 5, 10 and 2, and 12 and 0 samples."""
    before = "import json, torch\ntorch.set_num_threads(1)\ntorch.set_default_dtype(torch.float64)\n"
    whole = [before, *CODE[:ALONE], STEPS]
    names: dict[str, Any] = {}
    torch_dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    try:
        exec("\n".join(whole), names)
        exec("expected = trained(new(Encoder), criterion, slice(0, 12))", names)
    finally:
        torch.set_default_dtype(torch_dtype)
        torch.set_num_threads(threads)
    losses, grads = names["expected"]

    script = "\n".join([before, *CODE, STEPS, ON_A_RANK])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", script],
            env={**shared, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    told = [process.communicate(timeout=240) for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], told
    for out, _ in told:
        found = json.loads(out.splitlines()[-1])
        assert len(found) == 4
        for own_losses, own_grads in found:
            assert_close(torch.tensor(own_losses), torch.tensor(losses), rtol=1e-9, atol=1e-11)
            assert own_grads.keys() == grads.keys()
            for name, grad in grads.items():
                assert_close(torch.tensor(own_grads[name]), torch.tensor(grad), rtol=1e-8, atol=1e-10)
