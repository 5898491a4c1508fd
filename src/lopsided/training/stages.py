"""The stages of a run: built from a recipe, trained one after the other, saved in checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from time import perf_counter

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lopsided.data.augment import Augment, to_float
from lopsided.data.inputs import Indices, Inputs, MemoryInputs, Part, Prepared, row_batches
from lopsided.data.samplers import BatchSampler
from lopsided.distributed import Ranks
from lopsided.errors import InputError, RunError, sentence
from lopsided.evaluation.decision import TINY, HeldBack, fit_calibration, resolve
from lopsided.evaluation.epochs import figure_of
from lopsided.inference.engine import Engine, evaluating
from lopsided.inference.features import Extractor
from lopsided.inference.probabilities import share_rows
from lopsided.losses.deferred import ReweightedObjective
from lopsided.losses.objective import Objective
from lopsided.models.adapter import Adapter
from lopsided.models.encoders import build_encoder, seeded_init
from lopsided.models.ensemble import average
from lopsided.models.heads import ClassifierHead, ProjectionHead, build_head
from lopsided.models.machine import arrange, compile_encoder
from lopsided.models.model import AdapterCard, Model, ModelCard, all_finite
from lopsided.recipe import Classifier, EncoderTraining, LossSettings, Recipe
from lopsided.recipe.views import PLAIN, check_views, parse_views
from lopsided.seeds import derive_seed
from lopsided.training import fine_tune
from lopsided.training.adapter import Joined, Rows, fit_adapter
from lopsided.training.checkpoint import (
    ENCODER_NAME,
    Checkpoint,
    Facts,
    State,
    load_strictly,
    restoring,
)
from lopsided.training.deferred import deferred_epoch, first_kept, training_words
from lopsided.training.loop import Loop, Stage
from lopsided.training.prior import bias_between, carried_prior, regression_prior
from lopsided.training.regression import Regression, fit_regression
from lopsided.training.reporter import Log
from lopsided.training.rescale import Scales, choose_tau, normalise
from lopsided.training.selection import Judged, Selection, balanced_log_loss, centroid_logits, figures, probe_rows
from lopsided.training.step import of_loss

_ENCODER = "module.encoder."
"""Start of the names of the encoder's weights in a checkpoint."""
_AVERAGED = ", and the running statistics are averaged over the ranks after each epoch"


class Stages:
    """A run of one recipe on prepared data."""

    model: Model
    card: ModelCard

    def __init__(
        self,
        recipe: Recipe,
        prepared: Prepared,
        device: torch.device,
        log: Log,
        checkpoint: Checkpoint,
        ranks: Ranks | None = None,
    ) -> None:
        self.recipe, self.prepared, self.device = recipe, prepared, device
        self.log, self.checkpoint, self.ranks = log, checkpoint, ranks or Ranks()
        self.num_classes = len(prepared.classes)
        self._augment = self._choose_augment()
        self._engine: Engine | None = None
        self._extractor: Extractor | None = None
        self._told = self._early = False

    def build(self, *, fresh: bool = True) -> None:
        """Build the model. Only a fresh run loads ``encoder.weights``, because a checkpoint holds its own weights."""
        recipe, prepared, vector = self.recipe, self.prepared, self.prepared.kind == "vector"
        views = parse_views(recipe.encoder.views)
        check_views(views, prepared.kind, prepared.shape)
        scaling = "none" if vector else recipe.encoder.scaling  # Numbers of a table are no activations.
        if recipe.classifier.kind == "tau-norm" and recipe.classifier.tau is None and prepared.val is None:
            raise InputError("The data have no validation images to choose classifier.tau by. Set classifier.tau.")
        channels = 1 if vector else prepared.shape[0]
        encoder, features = self._encoder(fresh=fresh)
        heads = self._heads()
        adapter = None if heads is None else self._adapter(heads, features)
        with seeded_init(recipe.seed, "classifier"):
            first = recipe.first_stage().classifier_loss
            classifier = self._head(first, features if adapter is None else adapter.width)
        model = Model(encoder, classifier, prepared.mean, prepared.std, prepared.kind, adapter, views, scaling)
        self.model = model.to(self.device)
        if recipe.fast and not vector:
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
            features=features,
            head=recipe.classifier_loss.entry.head,
            adapter=heads,
            views=views,
            scaling=scaling,
        )

    def _encoder(self, *, fresh: bool) -> tuple[nn.Module, int]:
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

    def _head(self, loss: LossSettings, features: int) -> ClassifierHead:
        return build_head(loss.entry.head, features, self.num_classes, loss.parameters.get("scale", 1.0))

    def _heads(self) -> AdapterCard | None:
        section = self.recipe.adapter
        if self.recipe.method != "adapter":
            return None
        return AdapterCard(heads=section.heads, hidden=section.hidden, out=section.out, keep=section.blend > 0)

    def _adapter(self, heads: AdapterCard, features: int) -> Adapter:
        section = self.recipe.adapter
        with seeded_init(self.recipe.seed, "adapter"):
            return Adapter(
                features, **heads.model_dump(), input_dropout=section.input_dropout, dropout=section.dropout
            )  # fmt: skip

    def notes(self) -> Iterator[str]:
        """Yield a sentence for each setting that changes how a batch is computed."""
        settings, num = self.recipe.encoder_training, self.ranks.size
        if self.recipe.is_frozen:
            return
        norm = any(isinstance(child, _BatchNorm) for child in self.model.encoder.modules())
        if self.recipe.method == "fine-tune" and self.recipe.fine_tune.batch_norm == "frozen":
            norm = False
        if num > 1:
            yield f"{num} ranks share each batch of {settings.batch_size:,} images."
        if num > 1 and norm:
            over, after = ("all ranks", "") if settings.batch_norm == "sync" else ("each rank's own images", _AVERAGED)
            yield f'Batch norm computes its statistics over {over}: batch_norm is "{settings.batch_norm}"{after}.'
        if self.recipe.precision != "float32":
            yield f"The encoder is trained in {self.recipe.precision}; its weights and losses are float32."
        if settings.chunk_size is not None:
            whose = "each rank's share of a chunk" if num > 1 and settings.batch_norm == "rank" else "each chunk"
            rule = f"; batch norm treats {whose} as a batch" if norm else ""
            yield f"A batch goes through the encoder in chunks of {settings.chunk_size:,} images{rule}."
        if settings.queue:
            kind = "balanced over the classes" if settings.queue_balanced else "the most recent ones"
            yield f"A batch is also contrasted with up to {settings.queue:,} features of past batches, {kind}."
        yield from training_words(settings)

    def run(self, state: State, tensors: dict[str, Tensor]) -> None:
        """Run the remaining stages, starting at ``state``. ``state`` is updated in place."""
        self._begin = perf_counter() - state.seconds
        if state.stage == "frozen":
            self._regress()
            state.seconds = perf_counter() - self._begin
        elif state.stage == "adapter":
            state.history = self._adapt()
            state.epoch, state.seconds = len(state.history), perf_counter() - self._begin
        else:
            self._run_stages(state, tensors)
        self.model.eval()

    def _run_stages(self, state: State, tensors: dict[str, Tensor]) -> None:
        """Train the encoder, and then the classifier if it has a stage of its own. Rescale it at the end."""
        recipe, before = self.recipe, self.recipe.first_stage()
        if state.stage == "classifier":
            load_strictly(self._handed_on, self.checkpoint.load_weights(ENCODER_NAME))
        else:
            with self._as(before):  # The first stage is the same whatever follows.
                if state.stage == "fine-tune":
                    self._fine_tune(state, tensors)
                else:
                    stage = self._encoder_stage() if state.stage == "encoder" else self._end_to_end()
                    self._run_stage(stage, state, tensors)
            if recipe.blends:
                self._blend()
            elif state.stage == "fine-tune" and "logits" not in recipe.encoder_training.loss.entry.needs:
                self._regress(cached=False)
            state.seconds = perf_counter() - self._begin
        if recipe.method == "two-stage" or recipe.retrains:
            if state.stage != "classifier":
                self.checkpoint.save_weights(ENCODER_NAME, self._handed_on.state_dict())
                state.stage, state.epoch, state.selection, state.chosen, tensors = "classifier", 0, {}, None, {}
                self.checkpoint.save(state, {})
            with self._as(recipe if recipe.retrains else before):
                self._train_classifier(state, tensors)
        if recipe.classifier.kind == "tau-norm":
            self._normalise()

    @contextmanager
    def _as(self, recipe: Recipe) -> Iterator[None]:
        """Follow another recipe inside the block."""
        whole, self.recipe = self.recipe, recipe
        try:
            yield
        finally:
            self.recipe = whole

    def _train_classifier(self, state: State, tensors: dict[str, Tensor]) -> None:
        """Train the classifier on the frozen encoder: the model's own, a new one, or only the scales of its logits."""
        recipe = self.recipe
        if recipe.classifier.kind == "crt":
            with seeded_init(recipe.seed, "retrained"):
                self.model.classifier = self._head(recipe.classifier.loss, self.card.features).to(self.device)
        stage = self._classifier_stage()
        self._run_stage(stage, state, tensors)
        if isinstance(stage.module, Scales):
            stage.module.apply_to(self.model.classifier)

    @property
    def _handed_on(self) -> nn.Module:
        """What the first stage leaves for the second: the encoder, and its classifier if that is rescaled."""
        if self.recipe.classifier.kind != "lws":
            return self.model.encoder
        return nn.ModuleDict({"encoder": self.model.encoder, "classifier": self.model.classifier})

    def _normalise(self) -> None:
        """Apply tau-normalisation to the trained classifier. Validation images choose tau if the recipe does not."""
        head, val, tau = self.model.classifier, self.prepared.val, self.recipe.classifier.tau
        if tau is None:
            assert val is not None  # ``build`` has checked it.
            metric = self.recipe.selection.metric.removeprefix("smooth_").replace("last", "log_loss")
            features = self._features(val.inputs)

            def figure(logits: Tensor) -> float:
                found = {f"val_{name}": value for name, value in self._judged(logits, val.labels).items()}
                return figure_of(metric, [found]) or 0.0

            with torch.no_grad():
                tau, found = self.ranks.told(lambda: choose_tau(head.weight, features, figure))
            shown = f"tau = {tau:g}, the best of {len(found)} values by validation {metric.replace('_', ' ')}"
            self.log.event("tau", tau=tau, metric=metric, figures=found)
        else:
            shown = f"tau = {tau:g} of the recipe"
        normalise(head, float(tau))
        self.log.note(f"The weights of the classifier are divided by their length to the power {shown}, without bias.")

    @property
    def engine(self) -> Engine:
        """Computes the features of the finished model. After the first use, the model must not change."""
        if self._engine is None:
            self._engine = Engine(self.model, self.card.shape, fast=self.recipe.fast)
        return self._engine

    @property
    def extractor(self) -> Extractor:
        """Computes the features of the finished encoder. After the first use, the encoder must not change."""
        if self._extractor is None:
            self._extractor = Extractor(self.model, self.card, self.engine, self.ranks)
        return self._extractor

    def _fine_tune(self, state: State, tensors: dict[str, Tensor]) -> None:
        """Fit the regression and train the encoder or its last blocks."""
        recipe, section, counts = self.recipe, self.recipe.fine_tune, self.prepared.counts()
        if self.prepared.kind == "vector":
            raise InputError('Method "fine-tune" needs images, got vectors. Use the recipe default or from-scratch.')
        if tensors:
            own = {key.removeprefix(_ENCODER): value for key, value in tensors.items() if key.startswith(_ENCODER)}
            load_strictly(self.model.encoder, own)  # The front computes the activations with these weights.
        else:
            self._regress()
            shift = bias_between(regression_prior(recipe, counts), carried_prior(recipe, counts, early=True))
            with torch.no_grad():
                self.model.classifier.bias.add_(torch.from_numpy(shift).to(self.model.classifier.bias))
        self._engine = self._extractor = None  # The encoder changes now.
        sampler = fine_tune.fine_tune_sampler(recipe, self.prepared.train.labels)
        stage = self._fine_tune_stage(sampler)
        steps = fine_tune.num_steps(recipe, len(sampler), state.steps)
        if steps is None:
            seconds = 60 * (section.minutes or 0.0) - (perf_counter() - self._begin)
            found = fine_tune.settle_steps(self._loop(stage), stage.judge, seconds)
            steps = state.steps = self.ranks.told(lambda: found)
            self.log.note(fine_tune.budget_words(steps, section.minutes or 0.0, seconds))
        elif section.minutes is not None:
            self.log.note(f"The run keeps the {steps:,} steps that were settled when it started.")
        sampler.limit = stage.steps = steps
        stage.settings = recipe.encoder_training.model_copy(update={"epochs": -(-steps // len(sampler))})
        stage.warmup = round(section.warmup * steps)
        self._run_stage(stage, state, tensors)
        self.model.encoder.requires_grad_(True)

    def _blend(self) -> None:
        """Average the logits of a regression on the features of the trained encoder and of the pretrained encoder.

        The features of the trained encoder separate the images that it was trained on, so inner folds cannot choose the
        strength of their regression. It is that of the other regression.
        """
        tuned, prepared, share = self.model, self.prepared, self.recipe.fine_tune.blend
        encoder, features = self._encoder(fresh=True)
        head = self._head(self.recipe.classifier.loss, features)
        frozen = Model(
            encoder, head, prepared.mean, prepared.std, views=tuned.views, scaling=tuned.scaling
        ).to(self.device)  # fmt: skip
        if self.recipe.fast:
            arrange(frozen.encoder, self.device, prepared.shape)
        self.model, self._engine, self._extractor = frozen, None, None
        strength = self._regress()
        self.model, self._engine, self._extractor = tuned, None, None
        self._regress(cached=False, strength=strength)
        both = [(frozen, self.card), (tuned, self.card)]
        self.model, self.card = average(both, shares=(share, 1 - share))
        self._engine = self._extractor = None
        self.log.note(
            f"The model averages the logits of two regressions: on the features of the pretrained encoder (weight "
            f"{share:g}) and of the trained encoder (weight {1 - share:g})."
        )

    def _fine_tune_stage(self, sampler: BatchSampler) -> Stage:
        """Return the stage that trains the encoder, or its last blocks on the activations of the others."""
        recipe, section, val = self.recipe, self.recipe.fine_tune, self.prepared.val
        kept = None
        if section.blocks != "all":
            kept = fine_tune.Kept(self.model, self.prepared, recipe, self._augment, self.ranks, self.log)
        judge, features = None, self._features if kept is None else kept.features
        if val is not None:
            logits = "logits" in recipe.encoder_training.loss.entry.needs
            judge = self._judge(val, features) if logits else self._probe(val, features)
        stage = self._network_stage("fine-tune", judge, None if kept is None else kept.cut.rest)
        frozen = fine_tune.norm_layers(self.model.encoder) if section.batch_norm == "frozen" else ()
        return replace(
            stage,
            part=stage.part if kept is None else kept.part,
            sampler=sampler,
            transform=stage.transform if kept is None else kept.transform,
            frozen=frozen if kept is None else (*frozen, kept.cut.front),
            groups=fine_tune.parameter_groups(
                self.model.encoder, stage.trained, recipe.encoder_training, section.layer_decay
            ),
            average=section.average,
        )

    def _regress(self, *, cached: bool = True, strength: float | None = None) -> float:
        """Fit the classifier on the features of the encoder as it is. The first rank fits it for all ranks.

        ``cached`` is false for an encoder that no other run has. ``strength`` replaces that of the recipe. Return the
        strength of the regression.
        """
        settings, train = self.recipe.regression, self.prepared.train
        features = self._training_features(cached=cached)
        found: list[Regression] = []

        def fit() -> dict[str, Tensor]:
            fitted = fit_regression(
                features,
                train.labels,
                self.num_classes,
                groups=train.groups,
                weighted=self.recipe.classifier.loss.name == "weighted-ce",
                strength=settings.strength if strength is None else strength,
                folds=settings.folds,
                seed=self.recipe.seed,
            )
            found.append(fitted)
            return {"weight": torch.from_numpy(fitted.weight).float(), "bias": torch.from_numpy(fitted.bias).float()}

        state = self.ranks.spread(fit)
        self.model.classifier.load_state_dict(state)
        for fitted in found:
            if strength is None:
                self._tell_choice(fitted)
        chosen: float = self.ranks.told(lambda: found[0].strength)
        return chosen

    def _tell_choice(self, fitted: Regression) -> None:
        self.log.event("regression", strength=fitted.strength, folds=fitted.folds, losses=fitted.losses)
        self.log.note(_choice(fitted, self.recipe))

    def _training_features(self, *, cached: bool = True) -> npt.NDArray[np.float32]:
        """Return the features of the training images by the encoder as it is."""
        train = self.prepared.train
        self.model.eval()
        if not cached:
            train = replace(train, digests=None)
        elif self.prepared.kind == "image":
            root, views = self.extractor.root, self.model.views
            where = "not cached" if root is None else f"cached in {root}"
            engine = self.extractor.engine.name.split()[0]
            what = "" if views == PLAIN else f", averaged over the views {', '.join(views)} of each image"
            self.log.note(f"{engine} computes the features of {self.recipe.encoder.name}{what}. Features are {where}.")
        features = self.frozen_features(train, "features of training images")
        if not np.isfinite(features).all():
            raise RunError("The encoder returned NaN or infinite features. Use other weights (encoder.weights).")
        return self.engine.scale(features)

    def _adapt(self) -> list[Facts]:
        """Train the heads and fit the classifier. The first rank does it for all ranks. Return the facts of epochs."""
        recipe, train, features = self.recipe, self.prepared.train, self._training_features()
        adapter, steps = self.model.adapter, -(-len(train) // recipe.encoder_training.batch_size)
        assert adapter is not None
        found: list[Joined] = []

        def fit() -> dict[str, Tensor]:
            self.log.stage("adapter", recipe.encoder_training.epochs, steps)
            joined = fit_adapter(
                adapter,
                Rows(features, train.labels, train.groups, self.num_classes),
                recipe,
                lambda labels: self._objective(recipe.encoder_training.loss, labels, recipe.adapter.out),
                device=self.device,
                count=lambda done, total: self.log.count("heads", done, total),
            )
            found.append(joined)
            linear = {"weight": joined.linear.weight, "bias": joined.linear.bias}
            state = {f"classifier.{name}": torch.from_numpy(value).float() for name, value in linear.items()}
            return state | {f"adapter.{name}": value for name, value in adapter.state_dict().items()}

        state = self.ranks.spread(fit)
        for name in ("adapter", "classifier"):
            own = {key.removeprefix(f"{name}."): value for key, value in state.items() if key.startswith(f"{name}.")}
            self.model.get_submodule(name).load_state_dict(own)
        history: list[Facts] = self.ranks.told(lambda: found[0].history)
        for index, facts in enumerate(history, start=1):
            self.log.epoch(index, facts)
        for joined in found:
            if joined.regression is not None:
                self._tell_choice(joined.regression)
            self.log.note(_joined_words(joined, recipe))
        return history

    def frozen_features(self, part: Part, label: str) -> npt.NDArray[np.float32]:
        """Return the features of a split through the finished encoder, from the cache if they are there."""
        extractor = self.extractor
        found = extractor.features(part.inputs, part.digests, lambda done, total: self.log.count(label, done, total))
        if extractor.problem is not None and not self._told:
            self._told = True
            self.log.warn(extractor.problem)
        return found

    def _loop(self, stage: Stage) -> Loop:
        return Loop(
            stage,
            device=self.device,
            seed=self.recipe.seed,
            num_classes=self.num_classes,
            minority=self.prepared.minority,
            reporter=self.log,
            ranks=self.ranks,
            precision=self.recipe.precision,
        )

    def _run_stage(self, stage: Stage, state: State, tensors: dict[str, Tensor]) -> None:
        epochs, first = stage.settings.epochs, first_kept(stage.settings)
        loop = self._loop(stage)
        selection, metric = Selection(patience=self.recipe.selection.patience), self.recipe.selection.metric
        best: dict[str, Tensor] = {}
        if tensors:
            with restoring():
                loop.restore(tensors)
                selection = Selection.from_dict(state.selection, selection.patience, state.epoch)
                if state.chosen is not None:
                    best = self.checkpoint.load_weights(state.chosen)
                    if selection.best is None or not all_finite(best.values()):
                        raise ValueError("the chosen weights were never evaluated, or are not finite")
        written = state.chosen
        self.log.stage(stage.name, epochs, len(stage.sampler))
        while state.epoch < epochs and not selection.exhausted(state.epoch):
            index = state.epoch
            facts = loop.epoch(index, self.checkpoint)
            due = self.checkpoint.due()
            now = loop.tensors()
            if due or stage.judge is not None or index + 1 == epochs:  # Otherwise the next loss shows it.
                loop.check_weights(all_finite(now.values()), index, self.checkpoint)
            self._early = index < deferred_epoch(stage.settings)
            # Without a judge nothing reads the average yet, and its statistics cost a pass over all images.
            with loop.averaged(index) if stage.judge is not None else nullcontext():
                found = stage.judge() if stage.judge is not None else {}
                found = self.ranks.told(partial(dict, found))  # All ranks must select the same epoch despite rounding.
                facts |= {f"val_{name}": value for name, value in found.items()}
                state.history.append(facts)
                rows = [row for row in state.history if row["stage"] == stage.name]
                figure = figure_of(metric, rows[first:])
                if index >= first and selection.update(index, figure) and figure is not None:
                    best = {key: value.detach().clone() for key, value in stage.module.state_dict().items()}
                    state.chosen = f"chosen-{stage.name}-{index + 1}.safetensors"
            state.epoch, state.selection = index + 1, selection.to_dict()
            state.seconds = perf_counter() - self._begin
            self.log.epoch(index + 1, facts)
            if due:
                if state.chosen not in (None, written):
                    self.checkpoint.save_weights(state.chosen, best)
                    written = state.chosen
                self.checkpoint.save(state, now)
        if best:
            load_strictly(stage.module, best)
            text = f"Stage {stage.name} keeps epoch {selection.chosen + 1} of {state.epoch}"
            self.log.note(f"{text}, validation {metric.replace('_', ' ')} {abs(selection.best or 0.0):.4f}.")
        else:
            loop.keep_average(state.epoch - 1)

    def _encoder_stage(self) -> Stage:
        """Return the first of two stages: encoder, projection head, and a linear layer if the loss needs logits."""
        val = self.prepared.val
        return self._network_stage("encoder", None if val is None else self._probe(val))

    def _end_to_end(self) -> Stage:
        """Return the only stage: encoder, linear layer, and a projection head if the loss needs projections."""
        val = self.prepared.val
        return self._network_stage("end-to-end", None if val is None else self._judge(val, self._features))

    def _judge(self, val: Part, features: Callable[[Inputs], Tensor]) -> Callable[[], Judged]:
        """Return a function that evaluates the classifier on the features of validation images."""

        def judge() -> Judged:
            with evaluating(self.model):
                logits = self.model.classifier(features(val.inputs))
            return self._judged(logits, val.labels)

        return judge

    def _network_stage(
        self, name: str, judge: Callable[[], Judged] | None, encode: Callable[[Tensor], Tensor] | None = None
    ) -> Stage:
        """Return a stage that trains the encoder and the heads that its loss needs. ``encode`` computes features."""
        encode = encode or self.model.encode  # Training augments each image instead of averaging its views.
        settings, views = self.recipe.encoder_training, self.recipe.encoder_training.views
        needs = settings.loss.entry.needs
        module, heads = self._module(name, needs)

        def output(x: Tensor) -> Tensor:
            features = self.model.scale(encode(x))
            rows = torch.cat([head(features) for head in heads], dim=1) if len(heads) > 1 else heads[0](features)
            return rows if views == 1 else rows.view(len(rows) // views, views, -1)

        return Stage(
            name=name,
            section="encoder_training",
            module=module,
            settings=settings,
            part=self.prepared.train,
            sampler=self._sampler(name, settings),
            transform=lambda x, generator, start, total: self._augment(
                _repeat(x, views), generator, start=start * views, total=total * views
            ),
            output=output,
            objective=self._reweighted(self._objective(settings.loss)),
            projected=self.recipe.head.out if "projections" in needs else 0,
            judge=judge,
            views=views,
            min_batch=2,
            average=settings.ema,
        )

    def _module(self, name: str, needs: frozenset[str]) -> tuple[nn.Module, list[nn.Module]]:
        """Return the module to train, and the heads that feed the loss, the projection head first."""
        if "projections" not in needs:
            return self.model, [self.model.classifier]
        with seeded_init(self.recipe.seed, "projection"):
            projection = ProjectionHead(self.card.features, self.recipe.head.hidden, self.recipe.head.out)
        if "logits" not in needs:
            return nn.ModuleDict({"encoder": self.model.encoder, "projection": projection}), [projection]
        classifier = self.model.classifier
        if name == "encoder":  # The second stage trains the model's own classifier from the start.
            with seeded_init(self.recipe.seed, "joint"):
                classifier = self._head(self.recipe.encoder_training.loss, self.card.features)
        parts = {"encoder": self.model.encoder, "classifier": classifier, "projection": projection}
        return nn.ModuleDict(parts), [projection, classifier]

    def _objective(self, loss: LossSettings, labels: Indices | None = None, width: int | None = None) -> Objective:
        """Return the loss of a stage. ``labels`` are those of its images, by default of all training images."""
        numbers = self.prepared.counts() if labels is None else np.bincount(labels, minlength=self.num_classes)
        counts, entry = torch.from_numpy(numbers), loss.entry
        with seeded_init(self.recipe.seed, "objective"), of_loss(entry, "its constructor"):
            objective = entry.load()(counts, self.recipe.head.out if width is None else width, **loss.parameters)
            if not isinstance(objective, Objective):
                raise TypeError(f"{type(objective).__name__} does not derive from lopsided.losses.Objective")
            return objective

    def _reweighted(self, objective: Objective) -> Objective:
        """Return the objective of the first stage with the class weights of its last epochs, if it has any."""
        settings = self.recipe.encoder_training
        if settings.reweight_from is None:
            return objective
        counts = torch.from_numpy(self.prepared.counts())
        return ReweightedObjective(
            objective, counts, objective.width, defer=settings.reweight_from, beta=settings.reweight_beta
        )

    def _classifier_stage(self) -> Stage:
        settings, prepared = self.recipe.classifier, self.prepared
        classifier = self.model.classifier
        module: nn.Module = Scales(self.num_classes).to(self.device) if settings.kind == "lws" else classifier

        def output(features: Tensor) -> Tensor:
            logits: Tensor = classifier(features)
            return logits if module is classifier else module(logits.detach())

        val = None if prepared.val is None else (self._features(prepared.val.inputs), prepared.val.labels)

        def encode(x: Tensor, generator: torch.Generator, start: int, total: int) -> Tensor:
            with torch.no_grad():
                images = self._augment(x, generator, start=start, total=total)
                return self.model.scale(self.model.encode(images))

        def judge() -> Judged:
            assert val is not None
            with torch.no_grad():
                logits = output(val[0])
            return self._judged(logits, val[1])

        part, transform = prepared.train, encode
        if not settings.augment:
            part = Part(MemoryInputs(self._features(part.inputs)), part.labels)
            transform = _unchanged
        self.model.encoder.eval()
        return Stage(
            name="classifier",
            section="classifier",
            module=module,
            settings=settings,
            part=part,
            sampler=self._sampler("classifier", settings),
            transform=transform,
            output=output,
            objective=self._objective(settings.loss),
            judge=None if val is None else judge,
        )

    def _judged(self, logits: Tensor, labels: Indices) -> Judged:
        """Return the figures of validation images by the rule ``balanced``, or by ``plain`` if the recipe sets it."""
        prior = carried_prior(self.recipe, self.prepared.counts(), early=self._early)
        kind = self.recipe.decision.calibration
        rule = "plain" if self.recipe.decision.rule == "plain" else "balanced"
        p = logits.double().softmax(dim=1).cpu().numpy()
        if kind != "none":  # As the finished model will be.
            p = fit_calibration(HeldBack(p, labels), prior, biases=kind == "affine")(p)
        found = figures(resolve(rule, self.prepared.classes, prior).decide(p), labels, self.num_classes)
        balanced = np.log(np.maximum(p, TINY)) + np.array(resolve("balanced", self.prepared.classes, prior).offsets)
        return found | {"log_loss": balanced_log_loss(balanced, labels)}

    def _sampler(self, stage: str, settings: EncoderTraining | Classifier) -> BatchSampler:
        return BatchSampler(
            self.prepared.train.labels,
            settings.batch_size,
            kind=settings.sampler,
            m_per_class=settings.m_per_class if isinstance(settings, EncoderTraining) else None,
            last=settings.last_batch if isinstance(settings, EncoderTraining) else "keep",
            seed=derive_seed(self.recipe.seed, stage),
        )

    def _probe(self, val: Part, features: Callable[..., Tensor] | None = None) -> Callable[[], Judged]:
        """Return a function that evaluates the encoder by nearest class means of training images, not augmented."""
        train, features = self.prepared.train, features or self._features
        rows = probe_rows(train.labels, derive_seed(self.recipe.seed, "probe"))
        labels = torch.from_numpy(train.labels[rows]).to(self.device)

        def judge() -> Judged:
            known = features(train.inputs, rows)
            logits = centroid_logits(known, labels, features(val.inputs), self.num_classes)
            found = figures(logits.argmax(axis=1), val.labels, self.num_classes)
            return found | {"log_loss": balanced_log_loss(logits, val.labels)}

        return judge

    def _features(self, inputs: Inputs, rows: Indices | None = None) -> Tensor:
        """Return the features of inputs, not augmented, in the order of ``rows``. Each rank computes a share."""
        size = self.recipe.encoder_training.batch_size
        rows = np.arange(len(inputs)) if rows is None else rows
        share, sizes = share_rows(len(rows), self.ranks)
        own = rows[share]
        parts = [torch.empty(0, self.card.features, device=self.device)]
        with evaluating(self.model):
            batches = inputs.batches(own[part] for part in row_batches(len(own), size))
            parts += [self.model.features(_plain(x.to(self.device))) for _, x in batches]
        return self.ranks.gather(torch.cat(parts), sizes)

    def _choose_augment(self) -> Callable[..., Tensor]:
        cutmix = self.recipe.encoder_training.cutmix
        if self.prepared.kind == "vector" and cutmix and not self.recipe.is_frozen:
            must = "encoder_training.cutmix must be 0 for vectors, which have no boxes"
            raise InputError(sentence(must, cutmix, "Use encoder_training.mixup."))
        if self.prepared.kind == "vector":
            return _unchanged
        section = self.recipe.augment
        return Augment(
            rotation=section.rotation,
            horizontal_flip=section.horizontal_flip,
            vertical_flip=section.vertical_flip,
            crop=section.crop,
            colour=section.colour,
        )


def _choice(fitted: Regression, recipe: Recipe) -> str:
    if recipe.regression.strength is not None:
        return f"The regression has the strength C = {fitted.strength:g} of the recipe."
    if not fitted.losses:
        return f"A class has too few images for inner folds: the regression has the strength C = {fitted.strength:g}."
    tried = f"{len(fitted.losses)} values on {fitted.folds} inner folds"
    return f"The regression has the strength C = {fitted.strength:g}, the best of {tried}."


def _joined_words(joined: Joined, recipe: Recipe) -> str:
    heads = recipe.adapter.heads
    text = f"{heads} heads were trained" if heads > 1 else "One head was trained"
    if joined.num_folds:
        text += f", each without one of {joined.num_folds} inner folds, whose images calibrate the logits"
    else:
        text += " on all training images, because a class has too few images for inner folds"
    blend = f" Their average has the weight {1 - recipe.adapter.blend:g}." if recipe.adapter.blend else ""
    return f"{text}.{blend}"


def _plain(x: Tensor) -> Tensor:
    return to_float(x) if x.ndim == 4 else x


def _unchanged(x: Tensor, *_: object, **__: object) -> Tensor:
    return x


def _repeat(x: Tensor, views: int) -> Tensor:
    return x if views == 1 else x.repeat_interleave(views, dim=0)
