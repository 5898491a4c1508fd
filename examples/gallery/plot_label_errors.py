"""
Label errors
============

In most image sets some labels are wrong, and among few rare images each wrong one matters. A model that did not see
an image can doubt its label. This page flips some labels and looks for them.
"""

# %%
# Flip ten labels
# ---------------
# 280 T-shirts and 70 shirts. Five T-shirts are called shirts, and five shirts T-shirts.
import matplotlib.pyplot as plt
import numpy as np

from lopsided import LopsidedClassifier
from lopsided.data.sources import open_source
from lopsided.runs.results import check_labels

tops = open_source("fashion-mnist-tops")
rng = np.random.default_rng(2)
common, rare = (rng.permutation(np.flatnonzero(tops.labels == label)) for label in (0, 1))
chosen = np.concatenate([common[:280], rare[:70]])
images = tops.images.load(chosen, None, 1).numpy()[:, 0]
true = tops.labels[chosen]
flipped = np.concatenate([rng.choice(280, 5, replace=False), 280 + rng.choice(70, 5, replace=False)])
given = true.copy()
given[flipped] = 1 - given[flipped]

# %%
# Test every image
# ----------------
# ``folds=5`` gives each image a probability from a model that was not trained on it. The check sorts the images by
# the probability of their label.
model = LopsidedClassifier(recipe="quick", folds=5, random_state=0).fit(images, given)
check = check_labels(given, model.oof_proba_)
place = np.argsort(check.order)[flipped] + 1
print(f"{check.num_suspects} suspects among {len(given)} images")
print(
    f"flipped labels among the first 10: {np.sum(place <= 10)}, first 20: {np.sum(place <= 20)}, first 40: "
    f"{np.sum(place <= 40)} of 10"
)

# %%
# The first images of the list. A frame marks the labels that were flipped here. The others are pictures that look
# like the other class: a T-shirt with long sleeves, a shirt without buttons. So read the list as a list to look
# through.
names = np.array(["T-shirt", "shirt"])
fig, axes = plt.subplots(3, 8, figsize=(8, 4))
for axis, index in zip(axes.flat, check.order, strict=False):
    axis.imshow(images[index], cmap="gray_r")
    axis.set(xticks=[], yticks=[])
    axis.set_title(names[given[index]], fontsize=8)
    for side in axis.spines.values():
        side.set(color="#D55E00" if index in flipped else "#cccccc", linewidth=3 if index in flipped else 1)
fig.tight_layout()

# %%
# How far down to look
# --------------------
# The share of the flipped labels that were found, against the number of images looked at.
looks = np.arange(1, 101)
fig, axis = plt.subplots(figsize=(7, 2.8))
axis.plot(looks, [np.sum(place <= look) for look in looks], color="#0072B2", label="this order")
axis.plot(looks, 10 * looks / len(given), color="grey", linestyle=":", label="by chance")
axis.set(xlabel="images looked at", ylabel="flipped labels found", ylim=(0, 10.3))
axis.legend()
fig.tight_layout()
plt.show()

# %%
# On files, ``lopsided fit photos --out run --folds 5`` writes the same list as ``run/labels.csv``, and the page of
# the run shows its first images.
