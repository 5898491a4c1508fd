"""How large is the page of a run with 10,000 test images, how long does it take to build, and how fast does it answer?

    python benchmarks/report.py            prints a table and writes records/report_size.json (some minutes)

The run is made up, with pictures of 256 x 256 that compress as badly as photographs do. The page is opened in chromium
without a window; an answer is timed from the event to the second frame after it, when what it changed is on the screen.
The limits are those of the page: 15 MB, and a second for each answer.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from PIL import Image

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))
RECORD = ROOT / "benchmarks" / "records" / "report_size.json"
SIDE = 256
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync", "--no-first-run"]
ANSWERS = {
    "move the threshold": "() => { const r = document.getElementById('t-range'); r.value = 0.31; "
    "r.dispatchEvent(new Event('input')); }",
    "choose another class": "() => { const s = document.getElementById('t-class'); s.selectedIndex = 1; "
    "s.dispatchEvent(new Event('change')); }",
    "open the largest cell": "() => [...document.querySelectorAll('#matrix button')].reduce((a, b) => "
    "Number(a.textContent.replace(/,/g, '')) >= Number(b.textContent.replace(/,/g, '')) ? a : b).click()",
    "show more images": "() => document.getElementById('cell-more').click()",
    "colour the map by mistake": "() => document.querySelector('input[name=map-by][value=mistake]').click()",
    "rest on the map": "() => { const b = document.getElementById('map').getBoundingClientRect(); "
    "document.getElementById('map').dispatchEvent(new PointerEvent('pointermove', "
    "{clientX: b.left + b.width / 2, clientY: b.top + b.height / 2})); }",
    "list what is near on the map": "() => { const m = document.getElementById('map'); for (const key of "
    "['ArrowUp', 'Enter']) m.dispatchEvent(new KeyboardEvent('keydown', {key})); }",
    "sort the table of classes": "() => document.querySelector('#classes thead th button').click()",
    "change the theme": "() => document.getElementById('theme').click()",
}
TIMED = """async act => {
    const begin = performance.now();
    (0, eval)(act)();
    await new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)));
    return performance.now() - begin;
}"""


def make_picture(rng: np.random.Generator) -> Image.Image:
    """Draw a picture with the spectrum of a photograph: amplitudes that fall with the frequency."""
    frequency = np.hypot(np.fft.fftfreq(SIDE)[:, None], np.fft.rfftfreq(SIDE)[None])
    frequency[0, 0] = 1.0
    layers = []
    for _ in range(3):
        phases = np.exp(2j * np.pi * rng.random(frequency.shape))
        layer = np.fft.irfft2(phases / frequency**1.1, (SIDE, SIDE))
        layers.append(128 + 50 * layer / layer.std())
    return Image.fromarray(np.stack(layers, axis=-1).clip(0, 255).astype(np.uint8))


def make_folder(folder: Path, images: int, classes: int) -> Path:
    """Write the run and its source."""
    from made_runs import make_run

    rng = np.random.default_rng(0)
    rare = max(images // (5 * classes), 1)
    counts = [images - (classes - 1) * rare, *[rare] * (classes - 1)]
    names = [f"images/a-name-as-long-as-they-are-{i:05d}.jpg" for i in range(images)]
    labels = [f"class {i}" for i in range(classes)]
    run = make_run(folder / "run", labels, counts, [20] * classes, names=names, pictures=False)
    source = folder / "run-source"
    (source / "images").mkdir(parents=True)
    pool = [make_picture(rng) for _ in range(64)]
    for i, name in enumerate(names):
        content = io.BytesIO()
        turned = pool[i % len(pool)].transpose(Image.Transpose(i // len(pool) % 7))
        turned.save(content, "JPEG", quality=90)
        (source / name).write_bytes(content.getvalue())
    truth = np.repeat(labels, counts)
    lines = [f"{name},{label}" for name, label in zip(names, truth, strict=True)]
    (source / "table.csv").write_text("path,label\n" + "\n".join(lines) + "\n", encoding="utf-8")
    return run


def build(run: Path) -> tuple[float, float]:
    """Write the page by the command, as a process of its own; return the seconds by the clock and those of computing.

    A machine that others use, or that pauses, stretches the first and not the second.
    """
    begin, before = perf_counter(), computing()
    subprocess.run([sys.executable, "-m", "lopsided", "report", str(run)], check=True, stdout=subprocess.DEVNULL)
    return perf_counter() - begin, computing() - before


def computing() -> float:
    """The seconds that ended child processes have computed for."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def answer(page_file: Path) -> dict[str, float]:
    """Open the page in a browser and return the milliseconds until it was ready, and those of each answer."""
    from playwright.sync_api import sync_playwright

    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=FLAGS)
        page = browser.new_page(
            viewport={"width": 1280, "height": 900}, bypass_csp=True
        )  # For the timing's eval alone.
        page.goto(page_file.resolve().as_uri())
        page.wait_for_selector("html[data-ready=true]", state="attached")
        times = {"be ready": page.evaluate("performance.getEntriesByType('navigation')[0].domContentLoadedEventEnd")}
        for name, act in ANSWERS.items():
            times[name] = page.evaluate(TIMED, act)
        browser.close()
    return {name: round(value, 1) for name, value in times.items()}


def main() -> None:
    """Measure, print and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=10_000, help="test images (default: %(default)s)")
    parser.add_argument("--classes", type=int, nargs="+", default=[2, 50], help="numbers of classes (default: 2 50)")
    parser.add_argument("--out", type=Path, default=RECORD, help="record to write")
    options = parser.parse_args()
    results, load = {}, os.getloadavg()[0]
    for classes in options.classes:
        with tempfile.TemporaryDirectory() as folder:
            run = make_folder(Path(folder), options.images, classes)
            clock, cpu = build(run)
            page = run / "report.html"
            result: dict[str, Any] = {
                "megabytes": round(page.stat().st_size / 1e6, 2),
                "build_clock_s": round(clock, 2),
                "build_cpu_s": round(cpu, 2),
                "answers_ms": answer(page),
            }
        results[f"{options.images} images, {classes} classes"] = result
        took = f"built in {clock:.1f} s ({cpu:.1f} s of computing)"
        print(f"{options.images:,} images, {classes} classes: {result['megabytes']} MB, {took}")
        for name, value in result["answers_ms"].items():
            print(f"  {name:32}{value:8.0f} ms", flush=True)
    record = {
        "command": f"python benchmarks/report.py --images {options.images}",
        "machine": {
            "platform": platform.machine(),
            "python": platform.python_version(),
            "cores": os.cpu_count(),
            "load_before": round(load, 1),
        },
        "pages": results,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
