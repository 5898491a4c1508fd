"""
A rare class at 98:2
====================

686 T-shirts and 14 shirts to train on. What does a classifier make of it, and what does its accuracy say?

The pictures are part of the package, so this page needs no download.
"""

# %%
# The pictures
# ------------
# The embedded source has 2,000 pictures of each class. We draw the training images at 98:2 and keep 1,000 others,
# half of each class, to see what the model has learnt. A real data set has no such luxury; the page *Threshold with
# ten positives* shows what to do then.
import matplotlib.pyplot as plt
import numpy as np

from lopsided import LopsidedClassifier
from lopsided.data.sources import open_source
from lopsided.metrics import evaluate

tops = open_source("fashion-mnist-tops")
images = tops.images.load(np.arange(len(tops)), None, 1).numpy()[:, 0]
rng = np.random.default_rng(0)
common, rare = (rng.permutation(np.flatnonzero(tops.labels == label)) for label in (0, 1))
train = np.concatenate([common[:686], rare[:14]])
held_out = np.concatenate([common[1000:1500], rare[1000:1500]])
labels = np.array(["T-shirt", "shirt"])[tops.labels]

fig, axes = plt.subplots(2, 7, figsize=(7, 2.2))
for axis, index in zip(axes.flat, rare[:14], strict=True):
    axis.imshow(images[index], cmap="gray_r")
    axis.axis("off")
fig.suptitle("All 14 shirts that the model learns from")

# %%
# One fit
# -------
# The recipe ``quick`` computes features with an embedded, pretrained encoder and fits a logistic regression on them.
model = LopsidedClassifier(recipe="quick", random_state=0).fit(images[train], labels[train])
probabilities = model.predict_proba(images[held_out])
predicted = model.predict(images[held_out])

# %%
# Accuracy says nothing
# ---------------------
# Where the model is used, 98 of 100 pictures are T-shirts. We count the held-out pictures accordingly. Always
# answering T-shirt has an accuracy of 98 % there, and finds no shirt at all.
recall = {name: np.mean(predicted[labels[held_out] == name] == name) for name in model.classes_}
plain = model.classes_[probabilities.argmax(axis=1)]
plain_recall = {name: np.mean(plain[labels[held_out] == name] == name) for name in model.classes_}
rows = {
    "always T-shirt": {"T-shirt": 1.0, "shirt": 0.0},
    "most probable class (plain)": plain_recall,
    "rule of the model (balanced)": recall,
}
print(f"{'':30} accuracy at 98:2   mean recall   shirts found")
for name, found in rows.items():
    accuracy = 0.98 * found["T-shirt"] + 0.02 * found["shirt"]
    print(f"{name:30} {accuracy:16.1%} {np.mean(list(found.values())):13.1%} {found['shirt']:14.1%}")

# %%
# The rule that takes the most probable class has the higher accuracy, because it rarely decides for the rare class.
# The rule of the model divides each probability by the share of its class in training, and finds most of the shirts.

# %%
# Every figure with its interval
# ------------------------------
# ``evaluate`` gives the figures that the command prints.
result = evaluate(
    labels[held_out], probabilities, predicted, classes=[str(name) for name in model.classes_], bootstrap=500
)
for name in ("uwa", "accuracy", "auroc", "mcc"):
    print(f"{name:10} {result.figures[name]}")

# %%
# Where the scores lie
# --------------------
# The two rules read the same probabilities. Only the threshold differs.
score = probabilities[:, list(model.classes_).index("shirt")]
threshold = model.card_.prior[list(model.classes_).index("shirt")]
fig, axis = plt.subplots(figsize=(7, 3))
bins = np.linspace(-12, 4, 50)
for name, colour in (("T-shirt", "#0072B2"), ("shirt", "#D55E00")):
    chosen = score[labels[held_out] == name]
    axis.hist(np.log(chosen / (1 - chosen)), bins, alpha=0.6, label=name, color=colour)
for place, style, text in ((0.5, ":", "plain: p = 0.5"), (threshold, "-", f"balanced: p = {threshold:.2f}")):
    axis.axvline(np.log(place / (1 - place)), color="black", linestyle=style, label=text)
axis.set(xlabel="log-odds of shirt", ylabel="held-out pictures")
axis.legend()
fig.tight_layout()
plt.show()
