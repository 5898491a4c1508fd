"""Run the commands of docs/start.md on the embedded pictures, and keep the terminal output and pictures of the page.

    python scripts/start_page.py [--only pictures|texts]

The output of each command goes to docs/figures/start_VERB.txt and into the page, pictures to docs/figures/report.png
and docs/figures/start_report_threshold.png. The pictures need chromium (or a browser of its family) and playwright.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

from playwright.sync_api import sync_playwright

ROOT = Path(__file__).parents[1]
FIGURES = ROOT / "docs" / "figures"
PAGE = ROOT / "docs" / "start.md"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
COMMANDS = {
    "demo": "demo --quiet",
    "data": "data photos",
    "fit": "fit photos",
    "report": "report",
    "predict": "predict photos-more --out answers.csv",
    "evaluate": "evaluate photos-more",
    "export": "export --to onnx",
}
WIDTH = 100


def main() -> None:
    """Make the pictures in a temporary folder, run the commands there, and keep what they print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["pictures", "texts"], help="leave the others as they are")
    only = parser.parse_args().only
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None and only != "texts":
        sys.exit(f"One of {', '.join(BROWSERS)} must be installed, got none.")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run("data --sample photos", folder)
        for verb, command in COMMANDS.items():
            text = run(command, folder)
            if only != "pictures":
                (FIGURES / f"start_{verb}.txt").write_text(text, encoding="utf-8")
        if only != "pictures":
            rows = (folder / "answers.csv").read_text(encoding="utf-8").splitlines()[:4]
            (FIGURES / "start_answers.txt").write_text("\n".join(rows) + "\n", encoding="utf-8")
            PAGE.write_text(with_outputs(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
        if browser is not None and only != "texts":
            take_pictures(folder / "lopsided-demo" / "run" / "report.html", browser)


def with_outputs(page: str) -> str:
    """Return the page with the present texts in the blocks below the comments that name them."""
    return re.sub(
        r"(<!-- figures/(start_\w+\.txt) -->\n```\w+\n).*?```",
        lambda block: f"{block[1]}{(FIGURES / block[2]).read_text(encoding='utf-8')}```",
        page,
        flags=re.DOTALL,
    )


def run(command: str, folder: Path) -> str:
    """Return what a command prints, without the temporary folder and the lines of progress."""
    cache = folder / "cache"
    environment = os.environ | {"COLUMNS": str(WIDTH), "LOPSIDED_CACHE": str(cache), "NO_COLOR": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "lopsided", *command.split()],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=True,
    )
    text = done.stdout.replace(f"{cache}", "~/.cache/lopsided/features").replace(f"{folder}/", "")
    return f"$ lopsided {command}\n" + tidied(text)


def tidied(text: str) -> str:
    """Return the text without lines of progress, and wrapped as a terminal does it."""
    lines = [line for line in text.splitlines() if not re.fullmatch(r"[\w ,]+: \d+ of \d+(, .*)?", line)]
    wrapped = [part for line in lines for part in textwrap.wrap(line, WIDTH, drop_whitespace=True) or [""]]
    return "\n".join(part.rstrip() for part in wrapped).strip("\n") + "\n"


def take_pictures(page: Path, browser: str) -> None:
    """Take a picture of the top of the page with its mistakes, and of the threshold."""
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox", "--disable-gpu"])
        # Narrow, so that the words are legible where a page shows the picture in a column of text; sharp on any screen.
        shown = chromium.new_page(
            viewport={"width": 980, "height": 820},
            device_scale_factor=1.6,
            reduced_motion="reduce",
            color_scheme="light",
        )
        shown.goto(page.resolve().as_uri())
        shown.wait_for_selector("html[data-ready=true]", state="attached")
        shown.screenshot(path=FIGURES / "report.png")
        shown.locator("#threshold").first.evaluate("section => section.scrollIntoView()")
        shown.screenshot(path=FIGURES / "start_report_threshold.png")
        chromium.close()


if __name__ == "__main__":
    main()
