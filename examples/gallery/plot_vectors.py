"""
Plain vectors in a pipeline
===========================

The estimator follows scikit-learn's contract. So it takes a matrix of numbers, and works in a ``Pipeline``, in
``cross_val_predict`` and in ``GridSearchCV``. The data are scikit-learn's breast cancer set with most of the
malignant tumours left out.
"""

# %%
# The data
# --------
# 357 benign tumours and 25 malignant ones, 30 numbers each. Some numbers are missing, as in real tables.
import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_breast_cancer
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import balanced_accuracy_score, recall_score
from sklearn.model_selection import GridSearchCV, StratifiedKFold, cross_val_predict
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from lopsided import LopsidedClassifier, TwoStageClassifier

data = load_breast_cancer()
rng = np.random.default_rng(0)
malignant = rng.choice(np.flatnonzero(data.target == 0), 25, replace=False)
chosen = np.concatenate([np.flatnonzero(data.target == 1), malignant])
X, y = data.data[chosen].copy(), np.where(data.target[chosen] == 0, "malignant", "benign")
X[rng.random(X.shape) < 0.02] = np.nan
print({name: int(np.sum(y == name)) for name in ("benign", "malignant")})

# %%
# Three classifiers behind the same imputer
# -----------------------------------------
# ``LopsidedClassifier`` fits a logistic regression and decides by the rule ``balanced``. ``TwoStageClassifier`` first
# trains a small network with a contrastive loss.
methods = {
    "LogisticRegression": make_pipeline(SimpleImputer(), StandardScaler(), LogisticRegression(max_iter=1000)),
    "LopsidedClassifier": make_pipeline(SimpleImputer(), LopsidedClassifier(random_state=0)),
    "TwoStageClassifier, AFCL": make_pipeline(
        SimpleImputer(), TwoStageClassifier(loss="afcl", epochs=10, classifier_epochs=5, random_state=0)
    ),
}
folds = StratifiedKFold(5, shuffle=True, random_state=0)
scores = {}
for name, pipeline in methods.items():
    predicted = cross_val_predict(pipeline, X, y, cv=folds)
    scores[name] = balanced_accuracy_score(y, predicted), recall_score(y, predicted, pos_label="malignant")
    print(f"{name:26} mean recall {scores[name][0]:.3f}, malignant found {scores[name][1]:.3f}")

# %%
fig, axis = plt.subplots(figsize=(7, 2.4))
axis.barh(list(scores), [found for _, found in scores.values()], color="#0072B2", height=0.5)
axis.set(xlim=(0, 1), xlabel="share of the 25 malignant tumours found")
axis.invert_yaxis()
fig.tight_layout()

# %%
# With 25 rare samples, one sample more or less is 4 points. So these differences decide nothing by themselves; *How
# many rare test images does a claim need?* has the numbers.

# %%
# Any setting in a grid search
# ----------------------------
# ``score`` is the balanced accuracy, which ``GridSearchCV`` maximises here over two strengths and two rules.
search = GridSearchCV(
    make_pipeline(SimpleImputer(), LopsidedClassifier(random_state=0)),
    {
        "lopsidedclassifier__settings": [{"regression.strength": 0.01}, {"regression.strength": 1.0}],
        "lopsidedclassifier__decide": ["balanced", "plain"],
    },
    cv=folds,
).fit(X, y)
for settings, score in zip(search.cv_results_["params"], search.cv_results_["mean_test_score"], strict=True):
    strength = settings["lopsidedclassifier__settings"]["regression.strength"]
    print(f"{settings['lopsidedclassifier__decide']:10} strength {strength:<5} {score:.3f}")

# %%
# Folds of its own
# ----------------
# ``folds=5`` tests every sample inside ``fit`` and calibrates the probabilities on these scores.
model = LopsidedClassifier(folds=5, random_state=0).fit(SimpleImputer().fit_transform(X), y)
uwa = model.oof_figures_["figures"]["uwa"]
print(f"balanced accuracy {uwa['value']:.3f} [{uwa['low']:.3f}, {uwa['high']:.3f}]")
plt.show()
