"""What the trainers of all methods have in common: build the model, train it, and score images with it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from lopsided.data.inputs import Part, Prepared
from lopsided.errors import InputError, RunError
from lopsided.evaluation.calibration import carried_prior
from lopsided.facts import Fact, cautions, notes
from lopsided.facts.log import Log
from lopsided.inference.engine import Engine
from lopsided.inference.feature_cache import cache_root
from lopsided.inference.scorer import Scorer, SmallImages
from lopsided.models.blocks.block import Layout
from lopsided.models.blocks.columns import (
    GIVEN_AWAY,
    CategoryColumn,
    NumberColumn,
    fit_column,
    telling,
    width_of,
)
from lopsided.models.encoders import build_encoder, embedded_encoder, seeded_init
from lopsided.models.heads import Adapter, ClassifierHead, build_head
from lopsided.models.machine import arrange, compile_encoder
from lopsided.models.model import AdapterCard, Model, ModelCard, with_views
from lopsided.models.pretrained import hub_weights
from lopsided.ranks import ALONE, Ranks
from lopsided.recipe import LossSettings, Recipe
from lopsided.recipe.encoder_spec import EncoderSpec
from lopsided.recipe.entries import load
from lopsided.recipe.views import AUTO, PLAIN, check_views, computed_views
from lopsided.training.checkpoint import Checkpoint, State, load_strictly

Floats = npt.NDArray[np.float64]
Features = npt.NDArray[np.float32]


class Trainer:
    """Trains the model of one recipe on prepared data. A method overrides ``train``, and what else is different."""

    model: Model
    card: ModelCard
    begin = 0.0
    """When the training began, by ``perf_counter``, as if it had never been interrupted."""

    def __init__(
        self,
        recipe: Recipe,
        prepared: Prepared,
        device: torch.device,
        log: Log,
        checkpoint: Checkpoint,
        ranks: Ranks = ALONE,
    ) -> None:
        self.recipe, self.prepared, self.device = recipe, prepared, device
        self.log, self.checkpoint, self.ranks = log, checkpoint, ranks
        self.num_classes = len(prepared.classes)
        self._engine: Engine | None = None
        self._scorer: Scorer | None = None
        self.small: SmallImages | None = None
        """Keeps small versions of the images that are decoded for their features, for another use of the run."""
        self._told = False

    def build(self, *, fresh: bool = True) -> None:
        """Build the model. Only a fresh run loads ``encoder.weights``, because a checkpoint holds its own weights."""
        recipe, prepared, vector = self.recipe, self.prepared, self.prepared.kind == "vector"
        views = PLAIN if vector and recipe.encoder.views == AUTO else computed_views(recipe.encoder.views)
        check_views(views, prepared.kind, prepared.shape)
        scaling = "none" if vector else recipe.encoder.scaling  # Numbers of a table are no activations.
        channels = 1 if vector else prepared.shape[0]
        late = self._late_encoder() if fresh else None
        encoder, features = late or self.untrained(fresh=fresh)
        beside = self._fit_columns(told=fresh and self.ranks.first)
        inputs = features + width_of(beside)
        if fresh and self.ranks.first:
            for part, there in hub_weights(recipe.encoder.spec):
                self.log.fact(notes.hub_weights(part.name, there.address, there.megabytes, there.licence))
        heads, adapter = self.adapter(inputs) or (None, None)
        with seeded_init(recipe.seed, "classifier"):
            first = recipe.spec.head_loss(recipe.first_stage())
            classifier = self.head(first, inputs if adapter is None else adapter.width)
        model = Model(
            encoder, classifier, prepared.mean, prepared.std, prepared.kind, adapter, views, scaling
        )  # fmt: skip
        self.model = model.to(self.device)
        if recipe.fast and not vector and late is None:
            arrange(self.model.encoder, self.device, prepared.shape)
        if recipe.compile:
            compile_encoder(self.model.encoder, self.device, self.ranks.size)
        self.card = ModelCard(
            kind=prepared.kind,
            encoder=recipe.encoder.name,
            encoder_weights=recipe.encoder.weights,
            channels=channels,
            image_size=prepared.image_size,
            shape=prepared.shape,
            mean=prepared.mean,
            std=prepared.std,
            classes=prepared.classes,
            columns=prepared.columns,
            beside=beside,
            features=features,
            head=recipe.spec.head_loss(recipe).entry.head,
            adapter=heads,
            views=views,
            scaling=scaling,
            prior=carried_prior(recipe, prepared.counts()),
        )

    def untrained(self, *, fresh: bool = True) -> tuple[nn.Module, int]:
        """Return the encoder as it is before training, and the number of its features."""
        recipe, shape, vector = self.recipe, self.prepared.shape, self.prepared.kind == "vector"
        encoder, features = build_encoder(
            recipe.encoder.name,
            channels=1 if vector else shape[0],
            image_size=None if vector else (shape[1], shape[2]),
            in_features=shape[0] if vector else None,
            weights=recipe.encoder.weights if fresh and self.ranks.first else "none",
            seed=recipe.seed,
        )
        if fresh and recipe.encoder.weights != "none" and self.ranks.size > 1:
            load_strictly(encoder, self.ranks.spread(encoder.state_dict))
        return encoder, features

    @property
    def importance(self) -> npt.NDArray[np.float64] | None:
        """How much a regression on the features weighs each of them; None: all the same."""
        layout = self.model.layout or Layout.final(self.card.features)
        return layout.whole.importance(self.card.num_beside)

    def _fit_columns(self, *, told: bool) -> tuple[NumberColumn | CategoryColumn, ...]:
        """Return the columns of the recipe, by the training images. ``told``: say what they are."""
        train, asked = self.prepared.train, self.recipe.data.columns or ()
        rows = train.inputs.cells() if asked else []
        cells = [[row[place] for row in rows] for place in range(len(asked))]
        columns = tuple(map(fit_column, asked, cells))
        if told and columns:
            about = [column.about(own) for column, own in zip(columns, cells, strict=True)]
            self.log.fact(notes.table_columns(about, len(rows)))
            alone = {each.name: telling(own, train.labels, each) for each, own in zip(columns, cells, strict=True)}
            given = {name: round(reached, 3) for name, reached in alone.items() if reached >= GIVEN_AWAY}
            if given:
                self.log.fact(cautions.telling_columns(given))
        return columns

    def replace_model(self, model: Model) -> None:
        """Continue with another model, or with the same one after it was trained."""
        self.model, self._engine, self._scorer = model, None, None

    def take_views(self, views: Sequence[str]) -> None:
        """Continue with some of the views of the model."""
        self.card = with_views(self.model, self.card, views)
        self._scorer = None  # The engine asks the model for its views.

    def head(self, loss: LossSettings, features: int) -> ClassifierHead:
        """Return a new classifier of the kind that a loss needs."""
        return build_head(loss.entry.head, features, self.num_classes, loss.parameters.get("scale", 1.0))

    def _late_encoder(self) -> tuple[nn.Module, int] | None:
        """Return an encoder that gets its layers if its features are not cached, or None if it needs them anyway."""
        recipe, shape = self.recipe, self.prepared.shape
        alone = self.ranks.size == 1 and self.device.type == "cpu" and not recipe.compile
        if not (not recipe.spec.trains_encoder and alone and self.prepared.kind == "image" and shape[0] == 3):
            return None
        spec = EncoderSpec.parse(recipe.encoder.name, recipe.encoder.weights)  # Any views share one encoder.
        encoder = embedded_encoder(spec, shape, recipe.fast)
        return None if encoder is None else (encoder, encoder.layout.width)

    def adapter(self, features: int) -> tuple[AdapterCard, Adapter] | None:
        """Return heads on the features, if the method has any."""
        return None

    @property
    def engine(self) -> Engine:
        """Computes the features of the finished model. After the first use, the model must not change."""
        if self._engine is None:
            self._engine = Engine(self.model, self.card.shape, fast=self.recipe.fast)
        return self._engine

    @property
    def scorer(self) -> Scorer:
        """Computes features and probabilities of the finished model. After the first use, the encoder must not change.

        Its features are cached if no training changes the encoder.
        """
        if self._scorer is None:
            size = self.recipe.encoder_training.batch_size
            self._scorer = Scorer(
                self.model, self.card, engine=self.engine, ranks=self.ranks, small=self.small, batch_size=size
            )
        return self._scorer

    def frozen_means(self, part: Part, label: str, sets: Sequence[Sequence[str]]) -> list[Features]:
        """Return the features of a split by the finished encoder, or from the cache, for each set of views."""
        scorer = self.scorer
        found = scorer.means(part.inputs, part.digests, sets, lambda done, total: self.log.count(label, done, total))
        if scorer.problem is not None and not self._told:
            self._told = True
            self.log.fact(cautions.not_cached(scorer.problem))
        return found

    def training_features(self, sets: Sequence[Sequence[str]], *, cached: bool = True) -> list[npt.NDArray[np.float32]]:
        """Return the features of the training images by the encoder as it is, for each set of views."""
        train = self.prepared.train
        self.model.eval()
        if not cached:
            train = replace(train, digests=None)
        elif self.prepared.kind == "image":
            root, views, encoder = cache_root(), self.model.views, self.recipe.encoder
            engine = self.engine.name.split()[0]
            averaged = [] if views == PLAIN else list(views)
            cache = None if root is None else str(root)
            self.log.fact(notes.features(engine, encoder.name, averaged, encoder.views == AUTO, cache))
        found = self.frozen_means(train, "features of training images", sets)
        if not all(np.isfinite(features).all() for features in found):
            raise RunError("The encoder returned NaN or infinite features. Use other weights (encoder.weights).")
        for place, features in enumerate(found):  # One at a time, because many images need much memory.
            found[place] = self.engine.scale(features, self.scorer.beside(train.inputs.cells()))
        return found

    def notes(self) -> Iterator[Fact]:
        """Yield a note for each setting that changes how the method computes."""
        yield from ()

    def epochs(self, state: State) -> dict[str, int]:
        """Return the epochs of each stage of a run in this state."""
        return {name: number or 0 for name, number in self.recipe.spec.stages(self.recipe).items()}

    def run(self, state: State, tensors: dict[str, Tensor]) -> None:
        """Train what is left, starting at ``state``, which is updated in place."""
        self.begin = perf_counter() - state.seconds
        self.train(state, tensors)
        self.model.eval()

    @abstractmethod
    def train(self, state: State, tensors: dict[str, Tensor]) -> None:
        """Train what is left. ``tensors`` are those of the checkpoint, if there is one."""

    def expect(self) -> None:
        """Give the model the form of the finished one, for weights that come from another rank."""

    def score(self, part: Part) -> tuple[Floats, Features]:
        """Return the probabilities and the features of images by the finished model."""
        scored = self.scorer.score(part.inputs)
        return scored.probabilities, scored.features


class FeatureTrainer(Trainer):
    """Fits a linear classifier to the features of an encoder that is not trained. A method overrides ``fit``."""

    def fit(self, features: Features) -> tuple[Floats, Floats]:
        """Return weight (classes, width) and bias (classes,) of the classifier, given the training images' features.

        The probabilities must carry the class shares of the training images (``self.prepared.counts()``).
        """
        raise NotImplementedError

    def train(self, state: State, tensors: dict[str, Tensor]) -> None:
        """Fit the classifier. The first rank does it for all ranks."""
        (features,) = self.training_features([self.model.views])

        def fitted() -> dict[str, Tensor]:
            weight, bias = self.fit(features)
            return {"weight": torch.from_numpy(weight).float(), "bias": torch.from_numpy(bias).float()}

        self.model.classifier.load_state_dict(self.ranks.spread(fitted))
        state.seconds = perf_counter() - self.begin

    def score(self, part: Part) -> tuple[Floats, Features]:
        """Return the probabilities and the features of images, whose features may be cached."""
        (means,) = self.frozen_means(part, "features of test images", [self.model.views])
        beside = self.scorer.beside(part.inputs.cells())
        features = self.engine.adapt(means, beside)
        # Folds have other categories, so that only the features of images are those of all folds.
        shown = features if beside is None else self.engine.scale(means)
        return self.engine.probabilities(features), self.engine.whole(shown)


def make_trainer(
    recipe: Recipe, prepared: Prepared, device: torch.device, log: Log, checkpoint: Checkpoint, *arguments: Any
) -> Trainer:
    """Return the trainer of a recipe's method. The further arguments are those of ``Trainer``."""
    place = recipe.spec.trainer
    try:
        kind: type[Trainer] = load(place)
    except (ImportError, AttributeError) as error:
        raise InputError(f'The trainer of method "{recipe.method}", {place}, cannot be imported ({error}).') from error
    return kind(recipe, prepared, device, log, checkpoint, *arguments)
