"""
Skin lesions, by lesion
=======================

ISIC 2018 has several photographs of many lesions. If two of them are on both sides of a split, the test asks for what
the model has seen. This page runs where the images are: it reads them below ``$LOPSIDED_DATA``, and says so if they
are missing.
"""

# %%
# The images
# ----------
# All 115 dermatofibromas, and the melanomas of the first 200 lesions, as photographs with the lesion that each one
# shows.
import matplotlib.pyplot as plt
import numpy as np

from lopsided import LopsidedClassifier
from lopsided.data.sources import open_source
from lopsided.errors import LopsidedError

try:
    source = open_source("isic2018", classes=["MEL", "DF"])
except LopsidedError as error:
    source = None
    print(f"This page was built without the images. {error}")

# %%
if source is not None:
    lesions = list(dict.fromkeys(source.groups[source.labels == 0]))[:200]
    chosen = np.flatnonzero((source.labels == 1) | np.isin(source.groups, lesions))
    images = source.images.load(chosen, 224, 3).numpy().transpose(0, 2, 3, 1)
    labels, groups = np.array(source.classes)[source.labels[chosen]], source.groups[chosen]
    for name in source.classes:
        of_class = groups[labels == name]
        print(f"{name}: {len(of_class)} photographs of {len(set(of_class))} lesions")

# %%
# Two photographs of one lesion
# -----------------------------
# They are not the same picture, but a model that has seen one has an easy time with the other.
if source is not None:
    names, counts = np.unique(groups, return_counts=True)
    several = names[counts > 1][:4]
    fig, axes = plt.subplots(2, len(several), figsize=(7, 3.6))
    for column, lesion in enumerate(several):
        for row, place in enumerate(np.flatnonzero(groups == lesion)[:2]):
            axes[row, column].imshow(images[place])
            axes[row, column].axis("off")
        axes[0, column].set_title(labels[groups == lesion][0], fontsize=9)
    fig.tight_layout()

# %%
# Folds by image, and folds by lesion
# -----------------------------------
# Five folds test every image. Without groups, photographs of one lesion fall into several folds. With groups they
# stay together, and the interval counts lesions instead of photographs.
if source is not None:
    found = {}
    for name, given in (("by image", None), ("by lesion", groups)):
        model = LopsidedClassifier(recipe="quick", folds=5, random_state=0).fit(images, labels, given)
        found[name] = model.oof_figures_["figures"]["uwa"]
        value = found[name]
        print(f"{name:10} balanced accuracy {value['value']:.3f} [{value['low']:.3f}, {value['high']:.3f}]")

# %%
# By image, each photograph counts as independent, and the interval is too narrow. One draw of the folds does not show
# by how much the figure itself is too high: that differs from draw to draw. Only the figure by lesion may be
# believed.
if source is not None:
    fig, axis = plt.subplots(figsize=(7, 1.8))
    for place, figure in enumerate(found.values()):
        axis.plot([figure["low"], figure["high"]], [place, place], color="#0072B2", linewidth=3)
        axis.plot(figure["value"], place, "o", color="#D55E00")
    axis.set(yticks=range(len(found)), yticklabels=list(found), ylim=(-0.6, 1.6), xlabel="balanced accuracy")
    fig.tight_layout()
    plt.show()
