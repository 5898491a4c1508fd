"""The method of docs/add-a-method.md, laid out as another package would be."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "add-a-method.md"


def write_package(folder: Path) -> Path:
    """Write the modules of the page, and the metadata with the entry point."""
    spec, trainer = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    info = folder / "lopsided_nearest-0.1.dist-info"
    info.mkdir(parents=True)
    (folder / "nearest.py").write_text(spec, encoding="utf-8")
    (folder / "nearest_trainer.py").write_text(trainer, encoding="utf-8")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lopsided-nearest\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text("[lopsided.methods]\nnearest-mean = nearest:NEAREST_MEAN\n")
    return folder
