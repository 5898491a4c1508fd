"""Requests a second of `lopsided serve` against its engine alone, in one run.

    python benchmarks/serve.py             prints a line and writes records/serve.json (some minutes)

A run is trained on images that are made here. A server of it gets 2,000 requests with an image each, 16 at once, on
this machine. In between, the engine answers the same images without a server: from their bytes to decided classes and
typicality, as `lopsided predict` does, but without the cache of features. Both take turns, in blocks, so that other
work on the machine slows both down. The clients are a process of their own and have their share of the processors; the
engine alone has all of them.

The record holds the ratio, the time of the slowest of 100 requests, the memory of the server after each block, the
processor time per image of the engine alone, of the server and of its clients, and how many requests had no answer.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image

from lopsided import __version__

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "benchmarks" / "records" / "serve.json"
BLOCKS = 8
CLIENT = """
import asyncio, json, sys, time
port, number, together, folder = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
from pathlib import Path
images = [path.read_bytes() for path in sorted(Path(folder).glob("*.jpg"))]
head = b'--b\\r\\nContent-Disposition: form-data; name="image"; filename="i"\\r\\n\\r\\n'
bodies = [head + image + b"\\r\\n--b--\\r\\n" for image in images]
numbers = iter(range(number))
seconds, statuses = [], []
async def one():
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for i in numbers:
        body = bodies[i % len(bodies)]
        start = time.perf_counter()
        writer.write(b"POST /v1/predict HTTP/1.1\\r\\nHost: 127.0.0.1\\r\\n"
                     b"Content-Type: multipart/form-data; boundary=b\\r\\n"
                     b"Content-Length: %d\\r\\n\\r\\n" % len(body) + body)
        await writer.drain()
        line = await reader.readline()
        length = 0
        while (header := await reader.readline()) not in (b"\\r\\n", b""):
            if header.lower().startswith(b"content-length:"):
                length = int(header.split(b":")[1])
        content = json.loads(await reader.readexactly(length))
        good = line.split()[1] == b"200" and "predicted" in content["images"][0]
        statuses.append(good)
        seconds.append(time.perf_counter() - start)
    writer.close()
async def main():
    start = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(together)))
    print(json.dumps({"seconds": time.perf_counter() - start, "each": seconds, "good": sum(statuses),
                      "busy": time.process_time()}))
asyncio.run(main())
"""


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2_000)
    parser.add_argument("--together", type=int, default=16)
    parser.add_argument("--record", type=Path, default=RECORD)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        record = measure(Path(scratch), options.requests, options.together)
    options.record.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps({name: value for name, value in record.items() if name != "blocks"}))


def measure(scratch: Path, requests: int, together: int) -> dict[str, object]:
    """Return the record."""
    from lopsided import cli
    from lopsided.data.stored import Sent
    from lopsided.inference.predict import answers_of
    from lopsided.inference.scorer import Scorer
    from lopsided.runs.reopen import open_familiarity, open_model, open_use

    images, run = scratch / "images", scratch / "run"
    write_images(images, run.parent / "photos")
    fit = ["fit", str(scratch / "photos"), "--recipe", "quick", "--out", str(run), "--quiet", "--folds", "2"]
    assert cli.run([*fit, "image_size=224"]) == 0
    model, card = open_model(run, "cpu")
    familiarity, use = open_familiarity(run, card), open_use(run, card)
    assert familiarity is not None
    scorer = Scorer(model, card, cached="none", bank=familiarity.bank)

    def alone(number: int) -> tuple[float, float]:
        """Return the seconds and the processor time that the engine takes for images."""
        start, busy = time.perf_counter(), time.process_time()
        images = [Sent(str(i), contents[i % len(contents)]) for i in range(number)]
        for path, p, typicality in answers_of(scorer.stream(images), use):
            assert isinstance(p, np.ndarray)
            use.decision.answer(p, card.classes)
            familiarity.take(typicality, str(path))
        return time.perf_counter() - start, time.process_time() - busy

    contents = [path.read_bytes() for path in sorted(images.glob("*.jpg"))]
    command = [sys.executable, "-m", "lopsided", "serve", str(run), "--port", "0", "--device", "cpu"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        port = int((re.search(r":(\d+)/", server.stdout.readline()) or [""])[1])
        time.sleep(5)  # Until the known images are read.
        ask(port, 2 * together, together, images)
        alone(64)
        size, blocks, waited, good, memory, busy = requests // BLOCKS, [], [], 0, [], []
        for _ in range(BLOCKS):
            seconds, engine = alone(size)
            before = busy_seconds(server.pid)
            found = ask(port, size, together, images)
            good += found["good"]
            waited += found["each"]
            memory.append(resident(server.pid))
            busy.append([engine, busy_seconds(server.pid) - before, found["busy"]])
            blocks.append({"alone": size / seconds, "served": size / found["seconds"]})
    finally:
        server.send_signal(signal.SIGTERM)
        code = server.wait(60)
    ratios = [block["served"] / block["alone"] for block in blocks]
    return {
        "lopsided": __version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "requests": size * BLOCKS,
        "together": together,
        "ratio": round(float(np.median(ratios)), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "p50_seconds": round(float(np.quantile(waited, 0.5)), 4),
        "p99_seconds": round(float(np.quantile(waited, 0.99)), 4),
        "processor_ms_per_image": {
            name: round(float(seconds) / size * 1e3, 2)
            for name, seconds in zip(("engine", "server", "clients"), np.median(busy, axis=0), strict=True)
        },
        "lost": size * BLOCKS - good,
        "memory_mb_by_block": memory,
        "exit_code_after_sigterm": code,
        "blocks": blocks,
    }


def write_images(images: Path, photos: Path) -> None:
    """Write images of 320 x 240 pixels of two kinds: some to train with, and others to send."""
    for folder, number in ((photos / "smooth", 60), (photos / "rough", 30), (images, 100)):
        folder.mkdir(parents=True)
        for i in range(number):
            rng = np.random.default_rng([len(folder.name), i])
            side = 8 if folder.name == "smooth" or (folder is images and i % 2) else 60
            pixels = rng.integers(0, 256, (side * 3 // 4, side, 3), dtype=np.uint8)
            Image.fromarray(pixels).resize((320, 240), Image.Resampling.BICUBIC).save(folder / f"{i:03d}.jpg")


def ask(port: int, number: int, together: int, images: Path) -> dict[str, object]:
    """Send requests from a process of their own."""
    arguments = [str(port), str(number), str(together), str(images)]
    ended = subprocess.run(
        [sys.executable, "-c", CLIENT, *arguments], capture_output=True, text=True, check=True, timeout=900
    )
    return json.loads(ended.stdout)


def busy_seconds(process: int) -> float:
    """Return the processor time of a process so far."""
    parts = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(parts[11]) + int(parts[12])) / os.sysconf("SC_CLK_TCK")


def resident(process: int) -> float:
    """Return the memory of a process in MB."""
    status = Path(f"/proc/{process}/status").read_text()
    return round(int((re.search(r"VmRSS:\s+(\d+)", status) or ["", "0"])[1]) / 1024, 1)


if __name__ == "__main__":
    main()
