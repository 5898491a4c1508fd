from __future__ import annotations

import copy
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from lopsided.data.images import FileImages
from lopsided.errors import MissingDependencyError, RunError
from lopsided.evaluation.decision import Decision
from lopsided.evaluation.typicality import codes_of, make_bank
from lopsided.inference import export
from lopsided.inference.predict import answers_of
from lopsided.inference.scorer import Scorer
from lopsided.models import whole_graph
from lopsided.models.encoders import build_encoder
from lopsided.models.heads import ClassifierHead, CosineHead
from lopsided.models.model import Model, ModelCard, look, with_views
from lopsided.recipe.views import VIEWS
from lopsided.runs.reopen import open_model
from tiny import CLASSES, SIZE, write_model, write_photos

pytestmark = pytest.mark.slow

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple:
    return open_model(write_model(tmp_path_factory.mktemp("model")), "cpu")


@pytest.fixture(scope="module")
def exported(model: tuple, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("export") / "model.onnx"
    result = export.export_onnx(*model, out)
    assert result["checked"] == [1, 3]
    assert result["difference"] <= 1e-4
    return out


def test_another_program_gets_the_same_probabilities_from_pixels_between_0_and_1(
    model: tuple, exported: Path, tmp_path: Path
) -> None:
    paths = sorted(write_photos(tmp_path, {"cat": 6, "dog": 5}).rglob("*.png"))
    images = FileImages(paths)
    pixels = images.load(np.arange(len(paths)), SIZE, 3).numpy().astype(np.float32) / 255
    session = onnxruntime.InferenceSession(str(exported), providers=["CPUExecutionProvider"])
    _, found, _, label = session.run(None, {"images": pixels})
    np.testing.assert_array_equal(label, found.argmax(axis=1))  # This model decides for the most probable class.
    np.testing.assert_allclose(found, Scorer(*model).images(images), atol=1e-5)
    _, one, _, _ = session.run(None, {"images": pixels[:1]})
    np.testing.assert_allclose(one, found[:1], atol=1e-6)


def test_a_cosine_head_is_exported(tmp_path: Path) -> None:
    network, features = build_encoder("mlp-8", channels=1, image_size=6, seed=1)
    card = ModelCard(
        kind="image", encoder="mlp-8", channels=1, image_size=6, shape=(1, 6, 6), mean=(0.5,), std=(0.2,),
        classes=CLASSES, features=features, head="cosine", prior=(0.5, 0.5),
    )  # fmt: skip
    head = CosineHead(features, len(CLASSES), 12.0)
    with torch.no_grad():
        head.bias.copy_(torch.linspace(-1, 1, len(CLASSES)))
    result = export.export_onnx(Model(network, head, card.mean, card.std), card, tmp_path / "model.onnx")
    assert result["difference"] <= 1e-4


def test_the_views_of_a_model_are_inside_the_graph(model: tuple, tmp_path: Path) -> None:
    made, card = copy.deepcopy(model[0]), model[1]
    card = with_views(made, card, VIEWS)
    out = tmp_path / "model.onnx"
    assert export.export_onnx(made, card, out)["difference"] <= 1e-4
    session = onnxruntime.InferenceSession(str(out), providers=["CPUExecutionProvider"])
    pixels = np.random.default_rng(0).random((3, 3, SIZE, SIZE), dtype=np.float32)
    found = session.run(["logits"], {"images": pixels})[0]
    with torch.no_grad():
        each = [model[0](look(torch.from_numpy(pixels), view)).numpy() for view in VIEWS]
    np.testing.assert_allclose(found, np.mean(each, axis=0), atol=1e-5)
    assert json.loads(session.get_modelmeta().custom_metadata_map["views"]) == list(VIEWS)


def test_the_file_is_one_valid_model_that_says_what_it_takes(exported: Path) -> None:
    assert [path.name for path in exported.parent.iterdir()] == ["model.onnx"]
    proto = onnx.load(exported)
    onnx.checker.check_model(proto, full_check=True)
    facts = {item.key: item.value for item in proto.metadata_props}
    assert json.loads(facts["classes"]) == list(CLASSES)
    assert json.loads(facts["shape"]) == [3, SIZE, SIZE]
    assert facts["range"] == "[0, 1]"
    assert proto.producer_name == "lopsided"
    (given,) = proto.graph.input
    assert given.type.tensor_type.shape.dim[0].dim_param
    assert str(Path(__file__).parents[2]).encode() not in exported.read_bytes()


def test_answers_that_differ_are_no_success_and_leave_no_file(
    model: tuple, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    network, card = model
    make = whole_graph.model_to_onnx

    def other(model: Model, *arguments: object) -> object:
        with torch.no_grad():
            model.classifier.bias += torch.tensor([0.01, 0.0])
            content = make(model, *arguments)
            model.classifier.bias -= torch.tensor([0.01, 0.0])
        return content

    monkeypatch.setattr(whole_graph, "model_to_onnx", other)
    with pytest.raises(RunError, match=r"^onnxruntime must agree with torch within 0\.0001, got a difference of 0\.00"):
        export.export_onnx(network, card, tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())


def test_a_missing_package_is_named_with_the_extra_that_brings_it(
    model: tuple, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "onnxscript" else find(name))
    monkeypatch.setattr(export, "_written", lambda *_: None)
    must = (
        r"^export --to onnx needs onnxscript\. Not installed: onnxscript\. "
        r"Run pip install 'lopsided\[onnx\]'\.$"
    )
    with pytest.raises(MissingDependencyError, match=must):
        export.export_onnx(*model, tmp_path / "model.onnx")


@pytest.mark.parametrize("scaling", ["none", "root", "cube-root"])
def test_models_of_frozen_encoders_need_no_exporter(
    scaling: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    network, features = build_encoder("test_resnet+test_resnet+pixels", channels=3, image_size=32, seed=0)
    card = ModelCard(
        kind="image", encoder="test_resnet+test_resnet+pixels", channels=3, image_size=32, shape=(3, 32, 32),
        mean=(0.0,) * 3, std=(1.0,) * 3, classes=CLASSES, features=features, prior=(0.5, 0.5), scaling=scaling,
    )  # fmt: skip
    model = Model(network, ClassifierHead(features, 2), card.mean, card.std, scaling=card.scaling)
    card = with_views(model, card, ("identity", "hflip", "rot90"))
    monkeypatch.setattr(export, "_to_onnx", lambda *_: pytest.fail("torch's exporter was asked"))
    told: list[tuple[int, int]] = []
    result = export.export_onnx(model, card, tmp_path / "model.onnx", lambda done, total: told.append((done, total)))
    assert result["difference"] <= 1e-5
    assert told[-1] == (3, 3)
    onnx.checker.check_model(onnx.load(tmp_path / "model.onnx"), full_check=True)


def test_what_the_package_cannot_write_is_written_by_the_exporter(model: tuple, tmp_path: Path) -> None:
    network, card = model
    assert export._written(export._network(network, card), card, None) is not None
    cosine = Model(network.encoder, CosineHead(card.features, 2), card.mean, card.std)
    assert export._written(export._network(cosine, card), card, None) is None


def test_a_convolutional_encoder_is_exported_without_a_word(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = open_model(write_model(tmp_path, encoder="resnet10t", image_size=32), "cpu")
    assert export.export_onnx(*model, tmp_path / "model.onnx")["difference"] <= 1e-4
    assert capfd.readouterr() == ("", "")


def test_what_cannot_be_written_as_onnx_is_one_sentence_and_no_file(
    model: tuple, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Program:
        @property
        def model_proto(self) -> None:
            raise TypeError("expected an int, got a boolean\nand a page about it")

    monkeypatch.setattr(export, "_written", lambda *_: None)
    monkeypatch.setattr(torch.onnx, "export", lambda *_, **__: Program())
    must = r"^torch cannot export the encoder \S+ \(expected an int, got a boolean\)\.$"
    with pytest.raises(RunError, match=must):
        export.export_onnx(*model, tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())


def write_photographs(folder: Path) -> list[Path]:
    """Write JPEGs of the sizes of cameras and telephones, with detail at every scale: also grey, turned and small."""
    folder.mkdir()
    paths = []
    exif = Image.Exif()
    exif[0x0112] = 6
    for i, (width, height) in enumerate([(1600, 1200), (1200, 1600), (640, 480), (300, 200), (90, 70), (1024, 1024)]):
        rng = np.random.default_rng(i)
        layers = [
            np.asarray(Image.fromarray(rng.integers(0, 256, (k, k, 3), dtype=np.uint8)).resize((width, height)))
            for k in (3, 40, 300)
        ]
        image = Image.fromarray(np.mean(layers, axis=0).astype(np.uint8))
        for kind, turned in (("RGB", False), ("L", False), ("RGB", True)):
            paths.append(folder / f"{i}-{kind}-{turned}.jpg")
            image.convert(kind).save(paths[-1], quality=90, **({"exif": exif} if turned else {}))
    image.save(folder / "a.png")
    return [*paths, folder / "a.png"]


@pytest.mark.parametrize(("channels", "size"), [(3, 64), (1, 40)])
def test_the_program_in_the_docs_answers_as_predict_does(
    channels: int, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    network, features = build_encoder("mlp", channels=channels, image_size=size, seed=1)
    card = ModelCard(
        kind="image", encoder="mlp", channels=channels, image_size=size, shape=(channels, size, size),
        mean=(0.45,) * channels, std=(0.02,) * channels, classes=CLASSES, features=features, prior=(0.5, 0.5),
    )  # fmt: skip
    torch.manual_seed(0)
    model = Model(network, ClassifierHead(features, len(CLASSES)), card.mean, card.std)
    paths = write_photographs(tmp_path / "photos")
    odds = np.sort([np.log(p[1] / p[0]) for _, p, _ in answers_of(Scorer(model, card).stream(paths))])
    widest = int(np.argmax(np.diff(odds)))
    with torch.no_grad():  # Some answers are one class, some the other, and none is a draw.
        model.classifier.bias[1] -= float(odds[widest : widest + 2].mean())
    export.export_onnx(model, card, tmp_path / "model.onnx")
    text = (Path(__file__).parents[2] / "docs" / "onnx.md").read_text(encoding="utf-8")
    program = re.search(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert program is not None
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(program[1], names)
    answers = names["predict"](paths)
    expected = {path: answer for path, answer, _ in answers_of(Scorer(model, card).stream(paths))}
    assert len({label for label, _ in answers}) == 2, "A model with one answer would prove nothing."
    for path, (label, row) in zip(paths, answers, strict=True):
        np.testing.assert_allclose(row, expected[path], atol=1e-4, err_msg=path.name)
        assert label == CLASSES[int(np.argmax(expected[path]))]
    plain = np.stack([_plainly(path, size, channels) for path in paths])
    (other,) = names["session"].run(["probabilities"], {"images": plain})
    assert max(np.abs(other[i] - expected[path]).max() for i, path in enumerate(paths)) > 1e-3, (
        "Without the reduced decoding the answers differ, so the program must state it."
    )


def _plainly(path: Path, size: int, channels: int) -> np.ndarray:
    """Prepare an image without the reduced decoding."""
    image = ImageOps.exif_transpose(Image.open(path)).convert("L" if channels == 1 else "RGB")
    pixels = np.asarray(image.resize((size, size), Image.Resampling.BILINEAR), dtype=np.float32)
    return pixels.reshape(size, size, -1).transpose(2, 0, 1) / 255


def test_the_metadata_state_every_step_from_the_file_to_the_input(model: tuple, exported: Path) -> None:
    facts = {item.key: item.value for item in onnx.load(exported).metadata_props}
    assert json.loads(facts["jpeg_reduction"]) == [[8, 2.0], [4, 2.0], [2, 1.5]]
    assert facts["mode"] == "RGB"
    assert facts["scale"] == "divide by 255"
    assert facts["orientation"] == "upright by the EXIF orientation"
    page = (Path(__file__).parents[2] / "docs" / "onnx.md").read_text(encoding="utf-8")
    assert [key for key in facts if f"`{key}`" not in page] == []
    _, card = model
    kept = card.model_copy(update={"image_size": None})
    assert json.loads(export.facts(kept)["jpeg_reduction"]) == []


@pytest.mark.parametrize(
    "decision",
    [
        Decision(rule="tuned", scale=0.7, offsets=(0.4, 0.1)),
        Decision(rule="cost:cat=1,dog=4", costs=((0.0, 1.0), (4.0, 0.0))),
        Decision(rule="recall:dog>=0.9", offsets=(0.1, 2.3), target=1, threshold=0.3),
        Decision(rule="recall:cat>=0.9", offsets=(0.1, 2.3), target=0, threshold=0.7),
    ],
    ids=lambda decision: decision.rule,
)
def test_the_file_decides_like_the_rule_of_the_model(model: tuple, tmp_path: Path, decision: Decision) -> None:
    network, card = model
    card = card.model_copy(update={"decision": decision, "prior": (0.9, 0.1)})
    export.export_onnx(network, card, tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"), providers=["CPUExecutionProvider"])
    images = np.random.default_rng(0).random((64, 3, SIZE, SIZE), dtype=np.float32)
    logits, p, scores, label = session.run(None, {"images": images})
    np.testing.assert_allclose(p, np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True), atol=1e-5)
    np.testing.assert_allclose(scores, decision.scores(p), atol=1e-4)
    np.testing.assert_array_equal(label, decision.decide(p))
    facts = {item.key: item.value for item in onnx.load(tmp_path / "model.onnx").metadata_props}
    assert facts["decision"] == decision.rule
    assert json.loads(facts["prior"]) == [0.9, 0.1]


@pytest.mark.parametrize(("num", "per_group"), [((30, 12), 1), ((80, 40), 1), ((80, 40), 4), ((200, 100), 3)])
def test_typicality_sets_and_questions_are_exported(
    model: tuple, tmp_path: Path, num: tuple[int, int], per_group: int
) -> None:
    network, card = model
    paths = sorted(write_photos(tmp_path, dict(zip(CLASSES, num, strict=True))).rglob("*.png"))
    images = FileImages(paths).load(np.arange(len(paths)), SIZE, 3).numpy().astype(np.float32) / 255
    odd = np.stack([np.zeros((3, SIZE, SIZE), np.float32), np.ones((3, SIZE, SIZE), np.float32)])
    engine = Scorer(network, card).engine
    features = engine.features(torch.from_numpy(images))
    codes = codes_of(np.arange(len(paths)) // per_group, features)
    bank = make_bank(features, codes, features, codes, np.repeat([0, 1], num))
    assert bank is not None
    assert bank.num_units == len(paths) // per_group
    images = np.concatenate([images, odd])
    expected = bank.typicality(engine.features(torch.from_numpy(images)))
    for name, decision in (("set", {"sets": (0.6, 0.3)}), ("ask", {"error": 0.4})):
        ruled = card.model_copy(update={"decision": Decision(rule=name, **decision)})
        assert export.export_onnx(network, ruled, tmp_path / "model.onnx", bank=bank)["typicality"]
        onnx.checker.check_model(onnx.load(tmp_path / "model.onnx"), full_check=True)
        session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"), providers=["CPUExecutionProvider"])
        typicality, doubt, p = session.run(["typicality", name, "probabilities"], {"images": images})
        np.testing.assert_allclose(typicality, expected, atol=2.5 / len(paths))
        assert ((typicality <= 0.01) == bank.is_unfamiliar(expected)).all()
        said = ruled.decision.members(p) if name == "set" else ruled.decision.asks(p)
        np.testing.assert_array_equal(doubt, said)
    large = replace(bank, known=np.zeros((2000, 4001), np.float16))
    assert not export.export_onnx(network, card, tmp_path / "model.onnx", bank=large)["typicality"]
