"""A model card of a finished run: Markdown with metadata, as the Hugging Face hub reads it. Does not import torch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lopsided import __version__
from lopsided.evaluation.decision import explain
from lopsided.evaluation.metric_table import METRICS
from lopsided.recipe import RUNTIME_FIELDS, Recipe, words
from lopsided.recipe.encoder_spec import EncoderSpec
from lopsided.recipe.words import amount
from lopsided.reports.run_data import open_finished
from lopsided.reports.run_words import Facts, machinery, source_name, summary, warnings
from lopsided.reports.wording import clean, figure_value, interval, number
from lopsided.runs.metrics import Evaluation

FILL_IN = "**Fill in:**"
"""Marks what only the user can say."""
LICENCES = "https://huggingface.co/docs/hub/repositories-licenses"
_HIDDEN = RUNTIME_FIELDS | {"data.source", "data.more", "data.corrections", "encoder.weights", "data.fold"}
"""Fields that do not change the result, or that would publish a path of this machine."""


def model_card(
    folder: Path,
    facts: Mapping[str, Any],
    *,
    base_model: str | None = None,
    timm: bool = False,
    name: str = "",
    parts: Sequence[str] = (),
) -> str:
    """Return the card of a finished run. ``facts`` are those in ``model.json``.

    ``base_model`` is the name on the hub of the weights that the encoder started from. ``timm`` says that the card
    belongs to a folder that timm loads, and ``name`` is the name of this folder. If it is a folder of parts, ``parts``
    are the folders of its encoders.
    """
    run, metrics = open_finished(folder)
    split = next(iter(metrics.judged()), None)
    known = Facts(run.recipe, metrics, split)
    sections = [
        f"# {_plain(machinery(run.recipe))}",
        _plain(summary(known)),
        _to_fill_in(),
        *_data(known),
        *_training(known, base_model),
        *_results(known),
        *_decision(known),
        *_limits(known),
        *use(facts, name or folder.absolute().name, parts, timm=timm),
        "## Licence",
        _licence(run.recipe),
    ]
    task = "image-classification" if facts["kind"] == "image" else "tabular-classification"
    return (
        f"{_metadata(known, base_model, task=task, timm=timm, parts=parts, name=name or folder.absolute().name)}\n"
        + "\n\n".join(sections)
        + "\n"
    )


def _metadata(facts: Facts, base_model: str | None, *, task: str, timm: bool, parts: Sequence[str], name: str) -> str:
    """Return the YAML between the lines ``---``."""
    from huggingface_hub import EvalResult, ModelCardData

    results = []
    if facts.figures is not None and facts.split is not None:
        for key, metric in METRICS.items():
            figure = facts.figures.figures.get(key)
            if figure is not None and figure.value is not None:
                results.append(
                    EvalResult(
                        task_type=task,
                        dataset_type="imagefolder" if task.startswith("image") else "tabular",
                        dataset_name=source_name(facts.recipe),
                        dataset_split=facts.split_word(facts.split),
                        metric_type=metric.hub,
                        metric_name=metric.title,
                        metric_value=round(figure.value, 4),
                        metric_args={"low": round(figure.low or 0.0, 4), "high": round(figure.high or 0.0, 4)},
                    )
                )
    library = "onnx" if parts else "timm" if timm else "lopsided"
    content: dict[str, Any] = {"library_name": library, "pipeline_tag": task}
    others = ["timm", "onnx"] if parts else ["timm"] if timm else []
    content["tags"] = [task, "class-imbalance", "lopsided", *others]
    if base_model is not None:
        content["base_model"] = base_model
    if results:
        content |= {"model_name": clean(name), "eval_results": results}
    licence = f"# FILL IN the licence of this model: {LICENCES}\nlicense: unknown"
    return f"---\n{licence}\n{ModelCardData(**content).to_yaml().strip()}\n---\n"


def _to_fill_in() -> str:
    items = [
        "the licence, in the metadata above and at the end",
        "where the images come from, and that you may publish a model of them",
        "the intended use, and who answers questions",
    ]
    return "\n".join([f"{FILL_IN} before you share this model", *(f"- {item}" for item in items)])


def _data(facts: Facts) -> Iterator[str]:
    splits = [split for split in ("train", "val", "test") if facts.counts(split)]
    if facts.metrics.folds is not None:
        splits = ["test"]  # All images of the source. The training images may include further ones.
    header = [
        "class",
        *("images" if facts.metrics.folds is not None else f"{facts.split_word(s)} images" for s in splits),
    ]
    rows = [[_plain(name), *(f"{facts.counts(split).get(name, 0):,}" for split in splits)] for name in facts.classes]
    yield "## Data"
    yield f"{FILL_IN} origin and permission of the images ({_plain(source_name(facts.recipe))})."
    yield _table(header, rows)
    data = facts.recipe.data
    if facts.metrics.folds is not None:
        which = "Every image of this table" if data.more else "Every image"
        yield f"{which} was tested by a model that was not trained on it ({facts.metrics.folds.folds} folds)."
    if data.more:
        yield _further(facts, len(data.more))
    if (data.group or data.group_from) is not None:
        group = "group" if data.group in (None, "parent") else _plain(data.group)
        yield f"Images of the same {group} were kept in one split."
    if facts.metrics.unreadable:
        yield f"Left out because they could not be read: {amount(len(facts.metrics.unreadable), 'image')}."


def _further(facts: Facts, tables: int) -> str:
    """Return a sentence about the images of ``data.more``. The names of its tables are paths of a machine."""
    where = amount(tables, "table") + " of further labels"
    if facts.metrics.folds is None:
        return f"The training images include those of {where}. None of these is tested."
    trained, tested = facts.counts("train"), facts.counts("test")
    counts = {name: trained.get(name, 0) - tested.get(name, 0) for name in facts.classes}
    shown = ", ".join(f"{number:,} {_plain(name)}" for name, number in counts.items() if number > 0)
    return f"Further training images, from {where}: {shown or 'none'}. They are never tested."


def _training(facts: Facts, base_model: str | None) -> Iterator[str]:
    recipe, metrics = facts.recipe, facts.metrics
    yield "## Training"
    yield from _origin(recipe, base_model)
    yield "Fields of the recipe that differ from the recipe `from-scratch`:"
    yield f"```toml\n{recipe_lines(recipe)}\n```"
    versions = ", ".join(f"{name} {version}" for name, version in metrics.environment.packages.items())
    yield _plain(f"Trained with lopsided {metrics.lopsided} ({versions}), recipe {metrics.recipe[:12]}.")


def _origin(recipe: Recipe, base_model: str | None) -> Iterator[str]:
    """Yield a sentence about the pretrained weights of each encoder. ``base_model`` is that of a single encoder."""
    parts = recipe.encoder.spec.parts
    verb = "started from" if recipe.spec.trains_encoder else "has"
    for part in parts:
        which = "The encoder" if len(parts) == 1 else f"The encoder `{code(part.name)}`"
        if part.weights == "embedded":
            known = part.name.removeprefix("tf_efficientnet_lite")
            port = "" if base_model is None else f" The hub has another port as `{base_model}`."
            yield (
                f"{which} {verb} the ImageNet weights of EfficientNet-Lite{code(known)} that are part of lopsided "
                f"(Apache-2.0), a port of the weights of the TensorFlow authors.{port}"
            )
        elif part.weights == "timm":
            yield f"{which} {verb} the pretrained weights of timm{'' if base_model is None else f', `{base_model}`'}."
        elif part.is_hub:
            yield f"{which} {verb} the pretrained weights `{code(part.weights)}`."
        elif part.is_file:
            yield f"{which} {verb} the weights of the file `{code(Path(part.weights).name)}`."


def recipe_lines(recipe: Recipe) -> str:
    """Return the fields that decide a run and differ from ``from-scratch``, one per line, without paths."""
    usual = {path: value for path, _, value in words.leaves(Recipe())}
    lines = [
        f"{path} = {words.toml_value(value)}"
        for path, _, value in words.leaves(recipe)
        if path not in _HIDDEN and recipe.unused(path) is None and value is not None
        if path not in usual or usual[path] != value or path in ("method", "encoder.name", "seed")
    ]
    return clean("\n".join(lines)).replace("```", "'''")


def _results(facts: Facts) -> Iterator[str]:
    yield "## Results"
    figures = facts.figures
    if figures is None or facts.split is None:
        yield "There are no metrics, because no images were held out."
        return
    level = f"{100 * figures.level:g} % interval"
    yield f"On {amount(figures.num_images, f'{facts.split_word(facts.split)} image')}, decided by the rule below:"
    rows = []
    for key, metric in METRICS.items():
        figure = figures.figures.get(key)
        if figure is not None:
            vote = {"uwa": figures.majority.uwa, "accuracy": figures.majority.accuracy}.get(key)
            rows.append([metric.title, figure_value(figure), interval(figure), "" if vote is None else number(vote)])
    yield _table(["metric", "value", level, f"always {_plain(figures.majority.label)}"], rows)
    yield _table(["class", "images", "recall", "precision", "F1"], _class_rows(figures))
    for note in figures.notes:
        yield _plain(note)
    baseline = None if facts.metrics.baseline is None else facts.metrics.baseline.splits.get(facts.split)
    if baseline is not None:
        gap = baseline.difference
        yield (
            f"The recipe `quick` of lopsided has a balanced accuracy of {figure_value(baseline.uwa)} "
            f"{interval(baseline.uwa)} on the same images; the difference of this model to it is "
            f"{figure_value(gap)} {interval(gap)}."
        )


def _class_rows(figures: Evaluation) -> list[list[str]]:
    return [
        [
            _plain(row.label),
            f"{row.support:,}",
            *(f"{figure_value(f)} {interval(f)}" for f in (row.recall, row.precision, row.f1)),
        ]
        for row in figures.per_class
    ]


def _decision(facts: Facts) -> Iterator[str]:
    yield "## Decision rule"
    decision = facts.decision
    yield _plain(" ".join([explain(decision, facts.classes), *decision.notes]))
    known = facts.metrics.decision
    shares = ", ".join(f"{name} {share:.4g}" for name, share in zip(facts.classes, known.prior, strict=False))
    yield (
        f"The probabilities carry these class shares: {_plain(shares)}. Where the classes have other shares, "
        "divide by these and multiply by those (`lopsided predict --prevalence`)."
    )
    if not known.calibrated_on:
        yield "The probabilities are not calibrated on images of their own."
    else:
        what = "image, scored out-of-fold" if facts.metrics.folds is not None else "validation image"
        what_many = what.replace("image", "images")
        yield f"The probabilities are calibrated on {amount(known.calibrated_on, what, what_many)}."


def _limits(facts: Facts) -> Iterator[str]:
    yield "## Intended use and limits"
    yield f"{FILL_IN} for what the model may be used, and for what it must not be used."
    items = [
        "The metrics hold for images that are made and selected as the test images were. Test the model on images of "
        "your own before you rely on it: `lopsided evaluate RUN DATA`.",
        "An interval covers the chance of the draw of the test images, not another camera, place or time.",
        "The model knows its classes only. It gives an image of anything else to one of them. `lopsided predict` marks "
        "images of another kind, such as charts among photographs; a new kind of object on the same camera is often "
        "not noticed: of seven kinds of skin lesions, a model of two marked about 1 % of the images of the other five.",
    ]
    items += [f"{_plain(caution.title)}: {_plain(caution.text)}" for caution in warnings(facts)]
    yield "\n".join(f"- {item}" for item in items)


def use(card: Mapping[str, Any], name: str, parts: Sequence[str], *, timm: bool) -> Iterator[str]:
    """Yield the section on the use of a model. ``card`` holds the facts in ``model.json``."""
    yield "## How to use it"
    if card["kind"] == "vector":
        names = card["columns"]
        what = "columns " + ", ".join(f"`{code(name)}`" for name in names[:20]) if names else "numbers"
        yield "With lopsided, from the run folder:"
        yield "```\nlopsided predict RUN vectors.parquet --out answers.csv\nlopsided export RUN --to onnx\n```"
        yield f"Inputs are vectors of {card['shape'][0]:,} {what}{' and so on' if len(names) > 20 else ''}."
        return
    shape, grey = card["shape"], card["channels"] == 1
    mode = "L" if grey else "RGB"
    if parts:
        yield from _use_parts(card, name, parts, mode)
    elif timm:
        yield "With timm 1.0.16 or later:"
        yield (
            "```python\n"
            "import timm\nimport torch\nfrom PIL import Image\n\n"
            f'model = timm.create_model("local-dir:{code(name)}", pretrained=True).eval()  # or "hf-hub:OWNER/NAME"\n'
            "transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))\n"
            f'image = Image.open("image.png").convert("{mode}")\n'
            "with torch.no_grad():\n"
            "    probabilities = model(transform(image).unsqueeze(0)).softmax(dim=1)[0]\n"
            'print(dict(zip(model.pretrained_cfg["label_names"], probabilities.tolist())))\n'
            "```"
        )
        yield (
            "timm gives probabilities and no decision. `lopsided.json` holds the decision rule and the class shares. "
            "The calibration is part of the weights."
        )
    else:
        yield "With lopsided, from the run folder:"
        yield "```\nlopsided predict RUN images/ --out answers.csv\nlopsided export RUN --to onnx\n```"
    if card.get("beside"):
        yield from _beside(card["beside"])
    size = f"{shape[2]} x {shape[1]} pixels" if len(shape) == 3 else "their own size"
    colour = "grey" if grey else "colour"
    yield (
        f"Inputs are {colour} images of {size}: the whole image is resized ({card['interpolation']}, antialiased), "
        "upright by its EXIF orientation, with white behind transparent parts."
    )


def _beside(columns: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield what the model takes beside each image."""
    yield "Beside each image the model takes columns of a table, in this order; an empty cell is a missing value:"
    lines = []
    for column in columns:
        if column["kind"] == "number":
            what = f"a number, as (value - {column['mean']:.6g}) / {column['std']:.6g} (0 if missing)"
            lines.append(f"- `{code(column['name'])}`: {what}, and 1 if it is missing, otherwise 0")
        else:
            names = ", ".join(f"`{code(value)}`" for value in column["values"])
            lines.append(
                f"- `{code(column['name'])}`: 1 for its category, 0 for others, of {names}, or missing or unknown"
            )
    yield "\n".join(lines)
    yield (
        "`lopsided predict` takes a table with the columns path and these. The ONNX file has them as its second input, "
        "`columns`."
    )


VIEW_CODE = {
    "identity": "pixels",
    "hflip": "pixels.flip(-1)",
    "vflip": "pixels.flip(-2)",
    "rot180": "pixels.flip(-2, -1)",
    "rot90": "pixels.rot90(1, (-2, -1))",
    "rot270": "pixels.rot90(-1, (-2, -1))",
    "transpose": "pixels.transpose(-2, -1)",
    "transverse": "pixels.flip(-2, -1).transpose(-2, -1)",
}
"""The views of an image as torch writes them (``lopsided.models.model``)."""

_SCALING_CODE = {"root": "{0} = {0}.sign() * {0}.abs().sqrt()", "cube-root": "{0} = {0}.sign() * {0}.abs().pow(1 / 3)"}
"""The scaling of numbers as torch writes it, before they get length 1."""


def _use_parts(card: Mapping[str, Any], name: str, parts: Sequence[str], mode: str) -> Iterator[str]:
    """Yield two programs: the whole model with onnxruntime, and its encoders with timm."""
    height, width = card["shape"][1:]
    by = f"Image.Resampling.{card['interpolation'].upper()}"
    blocks = EncoderSpec.parse(card["encoder"]).blocks
    where = f'folder = "{code(name)}"  # or huggingface_hub.snapshot_download("OWNER/NAME")'
    more = ', "columns": columns' if card.get("beside") else ""
    shape = "[None, None]" if mode == "L" else ".transpose(2, 0, 1)[None]"
    yield "`model.onnx` is the whole model, decision included. It needs neither torch nor lopsided:"
    yield "\n".join(
        [
            "```python",
            'import os\n\nos.environ["ORT_DISABLE_TELEMETRY"] = "1"  # Else onnxruntime reports to its vendor.\n',
            "import json\n\nimport numpy as np\nimport onnxruntime\nfrom PIL import Image, ImageOps\n",
            where,
            'session = onnxruntime.InferenceSession(f"{folder}/model.onnx")',
            'classes = json.loads(session.get_modelmeta().custom_metadata_map["classes"])',
            f'image = ImageOps.exif_transpose(Image.open("image.png")).convert("{mode}")',
            f"image = image.resize(({width}, {height}), {by})",
            f"pixels = np.asarray(image, dtype=np.float32){shape} / 255",
            *(_BESIDE_CODE if card.get("beside") else ()),
            f'label, probabilities = session.run(["label", "probabilities"], {{"images": pixels{more}}})',
            "print(classes[label[0]], dict(zip(classes, probabilities[0].tolist())))",
            "```",
        ]
    )
    yield (
        f"The encoder{'s are' if len(parts) > 1 else ' is'} also here for timm 1.0.16 or later, for example to use the "
        "features or to train further:"
    )
    names = ", ".join(f'"{code(part)}"' for part in parts)
    views = ", ".join(VIEW_CODE[view] for view in card["views"])
    blocks = tuple(sorted(blocks, key=lambda block: block.reads == "image"))  # In the order of their columns.
    alone = len(parts) == 1 or all(block.reads == "image" for block in blocks)
    linear = card["adapter"] is None and card["head"] == "linear" and alone and all(block.program for block in blocks)
    linear = linear and not card.get("beside")
    root = _SCALING_CODE.get(card["scaling"], "")
    scaled = f"{root.format('columns')}\n    columns = columns / columns.norm()" if root else ""
    yield "\n".join(
        [
            "```python",
            *(["import json\n"] if linear else []),
            *(["import numpy as np"] if blocks else []),
            "import timm\nimport torch\nfrom PIL import Image",
            "from safetensors.torch import load_file\n" if linear else "",
            where,
            f'image = Image.open("image.png").convert("{mode}")',
            "features = []",
            f"for name in [{names}]:",
            '    encoder = timm.create_model(f"local-dir:{folder}/encoders/{name}", pretrained=True).eval()',
            "    pixels = timm.data.create_transform(**timm.data.resolve_model_data_config(encoder))(image)",
            "    with torch.no_grad():",
            f"        features.append(encoder(torch.stack([{views}])).mean(dim=0))",
            "features = torch.cat(features)",
            *([root.format("features"), _LENGTH_CODE[card["members"] > 1].format(**card)] if root else []),
            *(
                block.program.format(height=height, width=width, by=by, views=views, scaled=scaled)
                for block in (blocks if linear else ())
            ),
            *(_CLASSIFIER_CODE if linear else ["print(features.shape)"]),
            "```",
        ]
    )
    yield (
        "This gives probabilities and no decision. `lopsided.json` holds the decision rule and the class shares. The "
        "calibration is part of the classifier."
        if linear
        else "What follows on these features is in `classifier.safetensors`, as `lopsided.json` describes it, and in "
        "`model.onnx`."
    )


_BESIDE_CODE = (
    'row = {}  # The columns of the image, such as {"age": "50"}.',
    "columns = []",
    'for column in json.loads(session.get_modelmeta().custom_metadata_map["columns"]):',
    '    cell = str(row.get(column["name"], ""))',
    '    if column["kind"] == "number":',
    '        columns += [(float(cell) - column["mean"]) / column["std"], 0] if cell else [0, 1]',
    "    else:",
    '        columns += [cell == value for value in column["values"]] + [cell not in column["values"]]',
    "columns = np.array([columns], dtype=np.float32)",
)
"""How a program makes the second input of a model with columns of a table."""
_LENGTH_CODE = (
    "features = features / features.norm()",
    "features = torch.cat([part / part.norm() for part in features.chunk({members})])",
)
"""How scaled features get length 1: all of them together, or those of each member of an ensemble."""
_CLASSIFIER_CODE = (
    'classifier = load_file(f"{folder}/classifier.safetensors")',
    'probabilities = (classifier["weight"] @ features + classifier["bias"]).softmax(dim=0)',
    'classes = json.load(open(f"{folder}/lopsided.json", encoding="utf-8"))["classes"]',
    "print(dict(zip(classes, probabilities.tolist())))",
)


def code(text: str) -> str:
    """Return an untrusted text for a string literal in an example."""
    return re.sub(r'["\\`\n]', "_", clean(text))


def _licence(recipe: Recipe) -> str:
    text = f"{FILL_IN} the licence of this model."
    if recipe.encoder.spec.is_embedded:
        text += " The encoder's pretrained weights are under the Apache License 2.0, whose notice must stay with them."
    return text + f"\n\nThis card was made by lopsided {__version__} from the records of the run."


def _plain(text: str) -> str:
    """Return an untrusted text so that Markdown and HTML show it as it is, in one line.

    >>> _plain("a|b <script> [x](y)\\n# c")
    'a\\\\|b &lt;script> \\\\[x\\\\](y) # c'
    """
    text = " ".join(clean(text).split()).replace("&", "&amp;").replace("<", "&lt;")
    return re.sub(r"([\\`*|\[\]]|(?<!\w)_|_(?!\w))", r"\\\1", text)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table. Names in its cells must be plain."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
