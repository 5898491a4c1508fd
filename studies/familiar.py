"""Which images does a model recognise as unfamiliar? Charts, screenshots, noise, solar cells, and other diseases.

    python studies/familiar.py HAM10000 ELPV     adds to studies/records/familiar.json
    python studies/familiar.py                   prints the table of the record

``HAM10000`` holds ``ham10000.csv`` with path, label, group and source; ``ELPV`` is ``elpv_dataset/data`` of the package
elpv-dataset. The recipe ``quick`` is trained on melanomas (mel) and dermatofibromas (df), of which 30 % of the lesions
are held back. The method, its distance and the number of neighbours were chosen on solar cells and drawn images alone;
the other five classes were looked at once, for this table.

- false alarms: held-back images of the two known classes that are marked, and should not be.
- caught: images of another kind that are marked at the level 1 % and 5 %; AUROC against the held-back images.
- called rare: images that the model calls df; unmarked: those of them that are not marked.
- find: how many of the first images for df, in a pool of held-back lesions, drawn images and solar cells, are lesions.
"""

from __future__ import annotations

import csv
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw
from sklearn.metrics import roc_auc_score

import shared
from lopsided.inference.familiar import load_bank
from lopsided.inference.scorer import Scorer
from lopsided.models.model import load_model
from lopsided.recipe import named_recipe
from lopsided.runs.find import find_in_pool
from lopsided.runs.run import run_recipe

RECORD = shared.RECORDS / "familiar.json"
KNOWN, MOST, DRAWN = ("mel", "df"), 150, 20
STRENGTH = 0.01
"""The strength of the regression that inner folds choose for these images; giving it saves time."""
NAMES = {"mel": "melanoma", "df": "dermatofibroma", "vasc": "vascular lesion", "bcc": "basal cell carcinoma",
         "akiec": "actinic keratosis", "bkl": "benign keratosis", "nv": "naevus"}  # fmt: skip


def draw_images(folder: Path) -> dict[str, list[Path]]:
    """Draw charts, screenshots and noise."""
    generator, drawn = np.random.default_rng(0), {"charts": [], "screenshots": [], "noise": []}
    for i in range(DRAWN):
        chart = Image.new("RGB", (600, 450), "white")
        pen = ImageDraw.Draw(chart)
        pen.line((60, 20, 60, 400), fill="black", width=3)
        pen.line((60, 400, 580, 400), fill="black", width=3)
        tops = [(60 + 50 * x, int(400 - 350 * generator.random())) for x in range(11)]
        colour = tuple(generator.integers(0, 255, 3).tolist())
        if i % 2:
            pen.line(tops, fill=colour, width=4)
        else:
            for x, y in tops:
                pen.rectangle((x, y, x + 30, 400), fill=colour)
        pen.text((200, 5), f"Sales by month, region {i}", fill="black")
        screen = Image.new("RGB", (1280, 720), (240, 240, 245))
        pen = ImageDraw.Draw(screen)
        pen.rectangle((0, 0, 1280, 40), fill=(40, 60, 90))
        pen.rectangle((0, 40, 250, 720), fill=(225, 228, 235))
        for line in range(30):
            words = "Lorem ipsum dolor sit amet " * int(generator.integers(1, 4))
            pen.text((int(generator.integers(270, 900)), 60 + 21 * line), words, fill="black")
        colours = generator.integers(0, 256, (300, 300, 3)) if i % 2 else generator.normal(128, 40, (300, 300, 3))
        noise = Image.fromarray(np.clip(colours, 0, 255).astype(np.uint8))
        for kind, image in (("charts", chart), ("screenshots", screen), ("noise", noise)):
            drawn[kind].append(folder / f"{kind}-{i:02d}.png")
            image.save(drawn[kind][-1])
    return drawn


def write_table(path: Path, rows: list[dict[str, str]], root: Path) -> Path:
    """Write a table of the training images, with absolute paths."""
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(["path", "label", "group"])
        table.writerows([root / row["path"], row["label"], row["group"]] for row in rows if row["split"] == "train")
    return path


def measure(ham: Path, solar: Path) -> dict[str, Any]:
    """Train on two classes and score all others."""
    generator = np.random.default_rng(0)
    with (ham / "ham10000.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    lesions = sorted({row["group"] for row in rows})
    held = set(generator.choice(lesions, round(0.3 * len(lesions)), replace=False).tolist())
    rows = [{**row, "split": "test" if row["group"] in held else "train"} for row in rows]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        known = [row for row in rows if row["label"] in KNOWN]
        table = write_table(folder / "known.csv", known, ham)
        changes = {"data.val": 0.0, "data.test": 0.0, "data.allow_outside": True, "compare_quick": False, "threads": 1}
        changes["regression.strength"] = STRENGTH
        run = folder / "run"
        run_recipe(named_recipe("quick").override(**changes), run, data=table)
        images = {f"known: {name}": [ham / row["path"] for row in known if row["label"] == name
                                     and row["split"] == "test"] for name in KNOWN}  # fmt: skip
        for name in (name for name in NAMES if name not in KNOWN):
            paths = [ham / row["path"] for row in rows if row["label"] == name]
            chosen = generator.permutation(len(paths))[:MOST]
            images[name] = [paths[i] for i in sorted(chosen)]
        cells = sorted((solar / "images").glob("*.png"))
        images["solar cells"] = [cells[i] for i in sorted(generator.permutation(len(cells))[: 2 * MOST])]
        images |= draw_images(folder)
        model, card = load_model(run)
        bank = load_bank(run, card)
        assert bank is not None
        scorer = Scorer(model, card, bank=bank)
        scores = {kind: list(scorer.stream(paths)) for kind, paths in images.items()}
        typicality = {kind: np.concatenate([part.typicality for part in parts]) for kind, parts in scores.items()}
        rare = {
            kind: card.decision.decide(np.concatenate([part.probabilities for part in parts]))
            == card.classes.index("df")
            for kind, parts in scores.items()
        }
        usual = np.concatenate([typicality[f"known: {name}"] for name in KNOWN])
        kinds = {}
        for kind, values in typicality.items():
            unfamiliar = bank.is_unfamiliar(values)
            truth = np.repeat([0, 1], [len(usual), len(values)])
            kinds[kind] = {
                "images": len(values),
                "at 0.01": float(unfamiliar.mean()),
                "at 0.05": float(bank.is_unfamiliar(values, 0.05).mean()),
                "auroc": float(roc_auc_score(truth, -np.concatenate([usual, values]))),
                "called_rare": int(rare[kind].sum()),
                "called_rare_unmarked": int((rare[kind] & ~unfamiliar).sum()),
            }
        pool = [path for kind in ("known: mel", "known: df", "solar cells", "charts", "screenshots", "noise")
                for path in images[kind]]  # fmt: skip
        number = len(images["known: df"])
        first = {}
        for place in ("mark", "drop"):
            found = find_in_pool(run, [str(path) for path in pool], "df", folder / f"{place}.csv", top=number,
                                 unfamiliar=place)  # fmt: skip
            paths = {row.path for row in found.result.rows}
            first[place] = {
                "lesions": sum(str(ham) in path for path in paths),
                "df": len(paths & {str(path) for path in images["known: df"]}),
                "left_out": found.result.unfamiliar,
            }
        return {"known": len(bank.scores), "kinds": kinds, "find": {"pool": len(pool), "top": number, **first}}


def show(record: dict[str, Any]) -> None:
    """Print the record as a table."""
    print(f"{record['known']:,} known images\n\n| images | number | at 1 % | at 5 % | AUROC | called df, unmarked |")
    print("|---|---|---|---|---|---|")
    for kind, row in record["kinds"].items():
        name = NAMES.get(kind, f"held-back {NAMES[kind[7:]]}" if kind.startswith("known: ") else kind)
        shares = f"{row['at 0.01']:.1%} | {row['at 0.05']:.1%} | {100 * row['auroc']:.1f}"
        print(f"| {name} | {row['images']} | {shares} | {row['called_rare']}, {row['called_rare_unmarked']} |")
    print("\n", record["find"])


def main() -> None:
    """Measure if folders are given, and print the record."""
    parser = shared.parser(__doc__)
    parser.add_argument("folders", nargs="*", type=Path, metavar="HAM10000 ELPV")
    folders = parser.parse_args().folders
    if folders:
        shared.write_json(RECORD, measure(*(folder.resolve() for folder in folders)))
    show(shared.read_json(RECORD))


if __name__ == "__main__":
    main()
