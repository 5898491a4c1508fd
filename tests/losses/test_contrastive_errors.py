"""Bad input: one sentence each, tested by its text."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from batches import unit

from lopsided.losses import AsymmetricFocalContrastiveLoss, asymmetric_focal_contrastive_loss

Z, Y = unit(6, 3), torch.tensor([0, 1, 0, 1, 0, 1])
REFERENCE = (unit(2, 3), torch.tensor([0, 1]))
LEARNT = torch.tensor(0.1, requires_grad=True)

REFUSALS = [
    ({"eta": -3.0}, "eta must be >= 0 and finite, got -3.0. Use 0 for the symmetric loss."),
    ({"eta": float("nan")}, "eta must be >= 0 and finite, got nan. Use 0 for the symmetric loss."),
    ({"gamma": -1}, "gamma must be >= 0 and finite, got -1.0. Use 0 for the loss without focusing."),
    ({"gamma": "2"}, "gamma must be a number, got str. Pass a float."),
    ({"eta": True}, "eta must be a number, got bool. Pass a float."),
    ({"temperature": 0}, "temperature must be > 0 and finite, got 0.0. The paper uses 0.07."),
    ({"temperature": float("inf")}, "temperature must be > 0 and finite, got inf. The paper uses 0.07."),
    ({"eta": LEARNT}, "eta must be a number, got a tensor that requires grad. Pass a float."),
    ({"normalization": "Paper"}, "normalization must be one of 'paper', 'released', got 'Paper'."),
    ({"reduction": "avg"}, "reduction must be one of 'mean', 'sum', 'none', got 'avg'."),
    ({"reduction": None}, "reduction must be one of 'mean', 'sum', 'none', got None."),
    ({"tile": 0}, "tile must be 'auto', None or an int >= 1, got 0. It is the number of rows per block."),
    ({"tile": "big"}, "tile must be 'auto', None or an int >= 1, got 'big'. It is the number of rows per block."),
    ({"tile": True}, "tile must be 'auto', None or an int >= 1, got True. It is the number of rows per block."),
    ({"z": [[1.0]]}, "z must be a tensor of features, got list. Wrap it in torch.as_tensor."),
    (
        {"z": torch.ones(6, 3, dtype=torch.long)},
        "z must be a floating tensor, got torch.int64. Convert it with z.float().",
    ),
    ({"z": Z[0]}, "z must have shape (n, d) or (n, views, d), got (3,)."),
    ({"eta": torch.ones(2)}, "eta must be a number, got a tensor of shape (2,) and type torch.float32. Pass a float."),
    ({"eta": 10**400}, "eta must be >= 0 and finite, got inf. Use 0 for the symmetric loss."),
    ({"z": torch.zeros(6, 0, 3)}, "z must hold at least one sample, got shape (6, 0, 3)."),
    ({"z": Z[:0], "y": Y[:0]}, "z must hold at least one sample, got shape (0, 3)."),
    ({"y": None}, "y must hold one label per sample, got None. Pass labels, or a positive mask in their place."),
    ({"y": [0] * 6}, "y must be a tensor of labels, got list. Wrap it in torch.as_tensor."),
    ({"y": Y.float()}, "y must be an integer or boolean tensor, got torch.float32. Convert it with y.long()."),
    ({"y": Y[:5]}, "y must have shape (6,), one label per sample, got (5,)."),
    ({"y": Y[:, None]}, "y must have shape (6,), one label per sample, got (6, 1)."),
    ({"y": Y.to("meta")}, "y must be on the device of z, cpu, got meta."),
    ({"reference": Z[:2]}, "reference must be a pair (z_ref, y_ref), got Tensor."),
    ({"reference": (Z, Y, Y)}, "reference must be a pair (z_ref, y_ref), got tuple of length 3."),
    (
        {"reference": ([[0.0] * 3] * 2, Y[:2])},
        "z_ref must be a tensor of features, got list. Wrap it in torch.as_tensor.",
    ),
    ({"reference": (unit(2, 4), Y[:2])}, "z_ref must have the 3 features of z, got 4."),
    (
        {"z": unit(6, 2, 3), "reference": (unit(2, 4), Y[:2])},
        "z_ref must have the 3 features of z, got 4.",
    ),
    ({"z": unit(6, 2, 3), "reference": (unit(2, 2), Y[:2])}, "z_ref must have the 3 features of z, got 2."),
    ({"reference": (unit(2, 3, 4), Y[:2])}, "z_ref must have the 3 features of z, got 4."),
    ({"reference": (Z, Y[:2])}, "y_ref must have shape (6,), one label per sample, got (2,)."),
    (
        {"reference": (Z, None)},
        "y_ref must hold one label per reference sample, got None. Pass labels, or a positive mask.",
    ),
    (
        {"y": None, "positive": torch.ones(6, 6)},
        "positive must be a boolean tensor, got torch.float32. Compare it with 0 to make a mask.",
    ),
    (
        {"y": None, "positive": torch.ones(6, 5, dtype=torch.bool)},
        "positive must have shape (6, 6), samples by contrast samples, got (6, 5).",
    ),
    (
        {"y": None, "positive": torch.ones(6, 6, dtype=torch.bool, device="meta")},
        "positive must be on the device of z, cpu, got meta.",
    ),
    ({"reference": (Z.to("meta"), Y)}, "z_ref must be on the device of z, cpu, got meta."),
    (
        {"y": None, "positive": torch.ones(6, 6, dtype=torch.bool), "reference": (REFERENCE[0], None)},
        "positive must have shape (6, 8), samples by contrast samples, got (6, 6).",
    ),
]


@pytest.mark.parametrize(("bad", "sentence"), REFUSALS, ids=[sentence[:50] for _, sentence in REFUSALS])
def test_bad_input_is_refused_in_one_sentence(bad, sentence):
    arguments = {"z": Z, "y": Y} | bad
    with pytest.raises((TypeError, ValueError)) as caught:
        asymmetric_focal_contrastive_loss(arguments.pop("z"), arguments.pop("y"), **arguments)
    assert str(caught.value) == sentence


@pytest.mark.parametrize(
    ("bad", "sentence"),
    [
        ({"eta": -3.0}, "eta must be >= 0 and finite, got -3.0. Use 0 for the symmetric loss."),
        ({"gamma": -1.0}, "gamma must be >= 0 and finite, got -1.0. Use 0 for the loss without focusing."),
        ({"temperature": 0.0}, "temperature must be > 0 and finite, got 0.0. The paper uses 0.07."),
        ({"normalization": "Paper"}, "normalization must be one of 'paper', 'released', got 'Paper'."),
        ({"reduction": "avg"}, "reduction must be one of 'mean', 'sum', 'none', got 'avg'."),
        ({"eta_unit": "batch"}, "eta_unit must be one of 'absolute', 'parity', got 'batch'."),
        ({"tile": -1}, "tile must be 'auto', None or an int >= 1, got -1. It is the number of rows per block."),
    ],
)
def test_a_module_refuses_bad_settings_when_it_is_made(bad, sentence):
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        AsymmetricFocalContrastiveLoss(**bad)


@pytest.mark.parametrize("eta_unit", ["absolute", "parity"])
def test_a_module_says_of_its_input_what_the_function_says(eta_unit):
    loss = AsymmetricFocalContrastiveLoss(eta_unit=eta_unit)
    with pytest.raises(TypeError, match="z must be a floating tensor"):
        loss(torch.ones(6, 3, dtype=torch.long), Y)
    with pytest.raises(TypeError, match="z must be a tensor of features, got list"):
        loss([[1.0]], Y)
    with pytest.raises(TypeError, match="reference must be a pair"):
        loss(Z, Y, reference=Z)
    with pytest.raises(TypeError, match="z_ref must be a tensor of features, got NoneType"):
        loss(Z, Y, reference=(None, Y))


@pytest.mark.parametrize("number", [2, np.float32(2), np.int64(2), torch.tensor(2), torch.tensor([2.0])], ids=repr)
def test_numbers_of_every_kind_are_taken(number):
    expected = asymmetric_focal_contrastive_loss(Z, Y, eta=2.0, gamma=2.0)
    assert torch.equal(asymmetric_focal_contrastive_loss(Z, Y, eta=number, gamma=number), expected)
    assert torch.equal(asymmetric_focal_contrastive_loss(Z, Y, eta=2.0, gamma=2.0, tile=np.int64(256)), expected)


@pytest.mark.parametrize("y", [Y.bool(), Y.to(torch.int8), Y.to(torch.int32)], ids=["bool", "int8", "int32"])
def test_labels_of_every_whole_number_type_are_taken(y):
    loss = asymmetric_focal_contrastive_loss
    assert torch.equal(loss(Z, y, eta=2.0), loss(Z, Y, eta=2.0))
