"""The first cases of benchmarks/fuzz_losses.py, and whether it would notice."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

import lopsided.losses._kernel.tiled

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def fuzz() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "fuzz_losses.py"
    spec = importlib.util.spec_from_file_location("fuzz_losses", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_random_cases_of_every_type_and_layout_are_finite_and_agree_with_float64(fuzz: ModuleType) -> None:
    found = fuzz.try_cases(0, 99, minutes=60)
    assert found["failures"] == []
    assert found["cases"] == 100
    assert min(found["by_dtype"][name] for name in ("float64", "float32", "bfloat16", "float16")) > 5
    assert set(found["by_kind"]) == {
        "function", "module", "focal binary", "focal multi-class", "asymmetric", "metrics"
    }  # fmt: skip


def test_an_error_of_a_thousandth_in_one_term_is_noticed(fuzz: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    right = lopsided.losses._kernel.tiled.weights

    def wrong(num_positive: torch.Tensor, *rest: object) -> tuple[torch.Tensor, torch.Tensor | None]:
        w_pos, w_neg = right(num_positive, *rest)
        return w_pos * 1.001, w_neg

    monkeypatch.setattr(lopsided.losses._kernel.tiled, "weights", wrong)
    found = fuzz.try_cases(0, 39, minutes=60)
    assert any("is right" in failure["what"] for failure in found["failures"])
