"""
A loss in your own loop
=======================

``lopsided.losses`` needs torch alone. This page trains a small network with two of its losses, on points of two
classes at 95:5, and shows what becomes of the rare class.
"""

# %%
# Points on two arcs
# ------------------
import matplotlib.pyplot as plt
import torch
from sklearn.datasets import make_moons
from torch import nn

from lopsided.losses import AsymmetricFocalContrastiveLoss, ContrastiveLoss, parity_eta

points, labels = make_moons((760, 40), noise=0.15, random_state=0)
x, y = torch.tensor(points, dtype=torch.float32), torch.tensor(labels)
print("samples per class:", torch.bincount(y).tolist())

# %%
# The loop
# --------
# The modules take features of any length and normalise them. Nothing else changes in a loop.


def train(criterion: nn.Module, *, steps: int = 300, batch: int = 64) -> tuple[nn.Module, list[float]]:
    """Train two layers with a loss, and return the network and the loss of each step."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    losses = []
    for _ in range(steps):
        rows = torch.randint(len(x), (batch,))
        loss = criterion(net(x[rows]), y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return net, losses


criteria = {
    "CL": ContrastiveLoss(temperature=0.2),
    "AFCL, eta 0.5 of parity, gamma 2": AsymmetricFocalContrastiveLoss(
        eta=0.5, gamma=2.0, temperature=0.2, eta_unit="parity"
    ),
}
trained = {name: train(criterion) for name, criterion in criteria.items()}

# %%
# What the value of the loss means
# --------------------------------
# Features that say nothing give CL the value log(n - 1). Features in two tight clusters that are far apart give an
# anchor the value log m, m being the number of its positives. So the value falls from the first to the mean of the
# second, and there is nothing below. Values of two losses, or of two batch sizes, cannot be compared.
of_batch = torch.bincount(y) / len(y) * 64
print(f"CL at batch 64: from {torch.tensor(63.0).log():.2f} down to {((of_batch - 1).log() * of_batch).sum() / 64:.2f}")
print(f"eta of parity at batch 64: {parity_eta(64):.0f}")
fig, axes = plt.subplots(1, 2, figsize=(8, 2.6))
for axis, (name, (_, losses)) in zip(axes, trained.items(), strict=True):
    axis.plot(losses, color="#0072B2", linewidth=0.8)
    axis.set_title(name, fontsize=9)
    axis.set_xlabel("step")
fig.tight_layout()

# %%
# The features
# ------------
# The network ends in two numbers, and the loss looks at their direction. A class that is apart has directions of its
# own.
fig, axes = plt.subplots(1, 2, figsize=(8, 3.6), subplot_kw={"projection": "polar"})
for axis, (name, (net, _)) in zip(axes, trained.items(), strict=True):
    with torch.no_grad():
        z = nn.functional.normalize(net(x), dim=1)
    angle = torch.atan2(z[:, 1], z[:, 0])
    for label, colour in ((0, "#0072B2"), (1, "#D55E00")):
        chosen = angle[y == label]
        axis.scatter(chosen, 0.8 + 0.4 * torch.rand(len(chosen)), s=6, color=colour, label=("common", "rare")[label])
    axis.set(yticks=[], xticks=[])
    axis.set_title(name, fontsize=9)
axes[0].legend(loc="center", fontsize=8)
fig.tight_layout()
plt.show()

# %%
# An anchor alone in its class
# ----------------------------
# In a batch with one rare sample, CL gives this sample no gradient of its own. AFCL pushes it from the other class.
# Eta is the weight of this push; the paper takes up to 300 at a batch of 128.
z = nn.functional.normalize(torch.randn(16, 8, generator=torch.manual_seed(0)), dim=1)
alone = torch.tensor([0] * 15 + [1])
for name, criterion in (
    ("CL", ContrastiveLoss(reduction="none")),
    ("AFCL", AsymmetricFocalContrastiveLoss(eta=300.0, reduction="none")),
):
    values = criterion(z, alone)
    print(f"{name:5} loss of the lonely anchor {values[-1]:.3f}, mean of the others {values[:-1].mean():.3f}")
