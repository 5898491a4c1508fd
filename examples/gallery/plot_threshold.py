"""
A threshold with ten positives
==============================

The usual way to set a threshold is to try all of them on the validation images and to keep the best one. With ten
rare validation images, chance chooses. The alternative is to calibrate, to divide by the class shares, and to try
nothing.
"""

# %%
# The scores of one model
# -----------------------
# A model of 600 T-shirts and 60 shirts, and its scores for 2,600 other pictures, half of each class.
import matplotlib.pyplot as plt
import numpy as np

from lopsided import LopsidedClassifier
from lopsided.data.sources import open_source
from lopsided.evaluation.calibration import HeldBack, fit_calibration
from lopsided.evaluation.threshold_rules import images_for_recall

tops = open_source("fashion-mnist-tops")
images = tops.images.load(np.arange(len(tops)), None, 1).numpy()[:, 0]
rng = np.random.default_rng(1)
common, rare = (rng.permutation(np.flatnonzero(tops.labels == label)) for label in (0, 1))
train, others = np.concatenate([common[:600], rare[:60]]), np.concatenate([common[700:2000], rare[700:2000]])
model = LopsidedClassifier(recipe="quick", random_state=0).fit(images[train], tops.labels[train])
p = model.predict_proba(images[others]).astype(float)
y, prior = tops.labels[others], np.array(model.card_.prior)


def uwa(score: np.ndarray, threshold: float, labels: np.ndarray) -> float:
    """Return the mean of the two recalls if images from the threshold on are called shirts."""
    return float(np.mean(score[labels == 1] >= threshold) + np.mean(score[labels == 0] < threshold)) / 2


# %%
# Two hundred validation splits
# -----------------------------
# Each split draws 90 T-shirts and 10 shirts of these pictures. Two rules look at it: one takes the threshold with the
# highest mean recall on the split. The other calibrates on the split and decides for the highest p / prior; of two
# classes, this is the rare one from p = prior on. All other pictures say how good both thresholds really are.
found = {"highest validation figure": [], "calibrated, balanced": []}
promised = []
for _ in range(200):
    drawn = [rng.choice(np.flatnonzero(y == label), size, replace=False) for label, size in ((0, 90), (1, 10))]
    split = np.concatenate(drawn)
    rest = np.setdiff1d(np.arange(len(y)), split)
    candidates = np.sort(p[split, 1])
    best = candidates[np.argmax([uwa(p[split, 1], candidate, y[split]) for candidate in candidates])]
    promised.append(uwa(p[split, 1], best, y[split]))
    calibrate = fit_calibration(HeldBack(p[split], y[split]), prior)
    found["highest validation figure"].append(uwa(p[rest, 1], best, y[rest]))
    found["calibrated, balanced"].append(uwa(calibrate(p[rest])[:, 1], prior[1], y[rest]))
ceiling = max(uwa(p[:, 1], threshold, y) for threshold in np.quantile(p[:, 1], np.linspace(0, 1, 500)))
print(f"best threshold in hindsight:          {ceiling:.3f}")
for name, values in found.items():
    print(f"{name + ':':37} {np.mean(values):.3f}, worst of 200 {min(values):.3f}")
print(f"what the tried threshold promised:    {np.mean(promised):.3f}")

# %%
# The threshold that was tried promises too much, and delivers less. The other rule uses all scores of the split, not
# only the few near the threshold.
fig, axis = plt.subplots(figsize=(7, 3))
bins = np.linspace(min(min(values) for values in found.values()) - 0.01, ceiling + 0.01, 40)
for (name, values), colour in zip(found.items(), ("#D55E00", "#0072B2"), strict=True):
    axis.hist(values, bins, alpha=0.6, label=name, color=colour)
axis.axvline(ceiling, color="black", label="best in hindsight")
axis.set(xlabel="mean recall on the other pictures", ylabel="validation splits")
axis.legend()
fig.tight_layout()

# %%
# A recall to reach
# -----------------
# A rule such as ``recall:shirt=0.9`` needs rare images, too. To be 95 % sure of it, at least this many of them must be
# there, and all of them above the threshold. With fewer, ``fit`` says how sure it is.
for least in (0.8, 0.9, 0.95, 0.99):
    print(f"recall {least:.2f} needs {images_for_recall(least):4d} rare images")
plt.show()
