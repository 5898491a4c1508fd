"""Compute the gradients of a batch: shared among ranks, in chunks, with the loss of the whole batch.

A step has four parts:

1. Each rank encodes its share of the batch, and the features of all ranks are gathered.
2. Each rank uses its own features as anchors and all other features as ``reference``. This gives its part of the loss,
   and the gradient of this part with respect to every feature.
3. These gradients are summed over the ranks, which gives the gradient of the whole loss. Each rank sends the gradient
   of its own features back through its encoder.
4. The gradients of the weights are summed over the ranks. They equal the gradients of one process with the whole batch.

**Chunks.** With ``chunk_size``, the features are first computed chunk by chunk without a graph. Once their gradient is
known, each chunk goes through the encoder again, with a graph that is freed after the chunk. This is exact for an
encoder without batch statistics. Batch norm treats each chunk as a batch. Both passes use the same chunk and therefore
the same statistics; only the second pass changes the running statistics. Dropout is seeded for each chunk, so that both
passes use the same masks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lopsided.errors import InputError, is_out_of_memory
from lopsided.losses import catalogue
from lopsided.losses.objective import Objective, Samples
from lopsided.losses.queue import FeatureQueue
from lopsided.models.encoders import seeded_init
from lopsided.models.machine import evaluating, seeded
from lopsided.ranks import Ranks
from lopsided.recipe import LossSettings
from lopsided.seeds import derive_seed
from lopsided.stopping import STOPPING
from lopsided.training.batch_norm import BatchStatistics
from lopsided.training.batches import Batch, Mix, Mixer, mirrored, partners_of

if TYPE_CHECKING:
    from lopsided.training.loop import Stage


_TYPES = {"float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_SCALE, _GROWTH = "scaler.scale", "scaler.growth"


class Precision:
    """The precision in which an encoder is trained: torch's autocast and, for "fp16", its gradient scaler.

    Weights, batch statistics and losses are always float32.

    float16 gradients below 6e-8 become 0. So the gradients are multiplied by a large scale and divided by it at the
    end. A step in which a gradient overflows is skipped, and the scale is halved. All ranks skip the same steps,
    because they have the same sums of gradients.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        self.dtype, self.device = _TYPES[name], device
        self.scaler = torch.amp.GradScaler(device.type) if self.dtype == torch.float16 else None

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """Compute in this precision inside the block, for the operations that torch considers safe."""
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
            yield

    def scaled(self, grad: Tensor) -> Tensor:
        """Return a gradient times the current scale, to send back through the encoder."""
        if self.scaler is None:
            return grad
        scaled: Tensor = self.scaler.scale(grad)
        return scaled

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Update the weights from gradients that ``scaled`` returned."""
        if self.scaler is None:
            optimizer.step()
            return
        self.scaler.unscale_(optimizer)
        self.scaler.step(optimizer)
        self.scaler.update()

    def tensors(self) -> dict[str, Tensor]:
        """Return the scaler's state for a checkpoint."""
        if self.scaler is None:
            return {}
        state = self.scaler.state_dict()
        return {
            _SCALE: torch.tensor(state["scale"], dtype=torch.float64),
            _GROWTH: torch.tensor(state["_growth_tracker"]),
        }

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Load the result of ``tensors``."""
        if self.scaler is not None and _SCALE in tensors and _GROWTH in tensors:
            found = {"scale": float(tensors[_SCALE]), "_growth_tracker": int(tensors[_GROWTH])}
            self.scaler.load_state_dict({**self.scaler.state_dict(), **found})


@dataclass(frozen=True, eq=False)
class Found:
    """The result of a step: the loss of the whole batch, and the part of each sample of this rank with its label.

    A mixed sample has two parts, one for each of its labels.
    """

    loss: Tensor
    parts: Tensor
    labels: Tensor
    stops: Tensor | None = None
    """How many of several ranks are asked to stop."""


@contextmanager
def of_loss(entry: catalogue.Loss, what: str) -> Iterator[None]:
    """Run code of a loss. An error inside a loss of another package becomes an ``InputError`` that names the package.

    ``what`` names the part of the loss that runs.
    """
    try:
        with catalogue.running(entry, what):
            yield
    except catalogue.CatalogueError as error:
        if error.__cause__ is not None and is_out_of_memory(error.__cause__):
            raise error.__cause__ from None
        raise InputError(str(error)) from error


def make_objective(loss: LossSettings, counts: Tensor, width: int, seed: int) -> Objective:
    """Return the loss of a stage, given the images of each class and the number of columns of the projections."""
    entry = loss.entry
    with seeded_init(seed, "objective"), of_loss(entry, "its constructor"):
        objective = entry.load()(counts, width, **loss.parameters)
        if not isinstance(objective, Objective):
            raise TypeError(f"{type(objective).__name__} does not derive from lopsided.losses.Objective")
        return objective


class Step:
    """Computes the gradients of a stage, batch by batch."""

    def __init__(
        self,
        stage: Stage,
        *,
        ranks: Ranks,
        device: torch.device,
        seed: int,
        statistics: BatchStatistics,
        precision: Precision | None = None,
        queue: FeatureQueue | None = None,
        mixer: Mixer | None = None,
    ) -> None:
        self.stage, self.ranks, self.device, self.seed = stage, ranks, device, seed
        self.statistics, self.queue, self.mixer = statistics, queue, mixer
        self._past: tuple[Tensor, Tensor] | None = None
        self.precision = precision or Precision("float32", device)
        self.parameters = [parameter for parameter in stage.trained.parameters() if parameter.requires_grad]
        self.of_objective = [parameter for parameter in stage.objective.parameters() if parameter.requires_grad]

    def gradients(self, batch: Batch, inputs: Tensor, epoch: int, step: int, *, again: bool = False) -> Found:
        """Compute the gradients of the loss of the whole batch and store them in the parameters of every rank.

        ``inputs`` are the inputs of this rank's rows, or one placeholder input if the rank has no rows. If batches are
        mixed, the inputs of further partners follow (see ``batches``). ``again`` is for a second call with the same
        batch: it uses the queue as it was before the first call, and leaves it as it is.
        """
        names = (self.stage.name, epoch, step)
        whole = torch.from_numpy(self.stage.part.labels[batch.rows]).to(self.device)
        mix = None if self.mixer is None else self.mixer.draw(inputs.shape, *names)
        chunked = len(batch.chunks) > 1
        if self.queue is not None and not again:
            self._past = self.queue.reference()

        def forward(chunk: int) -> Tensor:
            return self.encode(batch, inputs, chunk, names, mix)

        if not chunked:
            outputs = forward(0)
        else:
            with torch.no_grad(), self.statistics.kept():
                outputs = torch.cat([forward(chunk) for chunk in range(len(batch.chunks))])
        # Losses are computed in float32 or wider.
        wide = outputs.detach().to(torch.promote_types(outputs.dtype, torch.float32))
        parts, grad = self._loss(wide, whole, batch, epoch, mix, push=not again)
        grad = self.precision.scaled(grad)
        if not chunked:
            _backward(outputs, grad)
        else:
            sizes = [share.stop - share.start for share in batch.shares(self.ranks.rank)]
            for chunk, part in enumerate(torch.split(grad, sizes)):
                _backward(forward(chunk), part)
        loss = parts.sum()
        stops = self._sum_gradients(loss)
        positions = torch.from_numpy(batch.positions(self.ranks.rank)).to(self.device)
        labels = whole[positions] if mix is None else torch.cat([whole[positions], whole.flip(0)[positions]])
        return Found(loss, parts, labels, stops)

    def encode(
        self, batch: Batch, inputs: Tensor, chunk: int, names: tuple[str | int, ...], mix: Mix | None = None
    ) -> Tensor:
        """Return the outputs of this rank's share of a chunk of a batch, of whose rows ``inputs`` are the inputs."""
        stage, shares = self.stage, batch.shares(self.ranks.rank)
        share, done = shares[chunk], sum(share.stop - share.start for share in shares[:chunk])
        absent = share.stop == share.start
        x = inputs[:1] if absent else inputs[done : done + share.stop - share.start]
        start, total = (0, 1) if absent else (share.start, len(batch))
        with ExitStack() as stack:
            if len(shares) > 1:
                stack.enter_context(seeded(self.device, self.seed, "dropout", *names, self.ranks.rank, chunk))
            if absent and not self.statistics.exchanged:
                stack.enter_context(evaluating(stage.module))  # Only the shape is used.
            self.statistics.ghost = absent
            x = self._transformed(x, start, total, names)
            if mix is not None and not absent:
                x = self._mixed(mix, x, batch, inputs, share, names)
            with self.precision.autocast():
                outputs = stage.output(x)
        return outputs[:0] if absent else outputs

    def _transformed(self, x: Tensor, start: int, total: int, names: tuple[str | int, ...]) -> Tensor:
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "augment", *names))
        return self.stage.transform(x.to(self.device), generator, start, total)

    def _mixed(
        self, mix: Mix, x: Tensor, batch: Batch, inputs: Tensor, share: slice, names: tuple[str | int, ...]
    ) -> Tensor:
        """Return the transformed images of a share, mixed with their partners."""
        if len(x) == len(batch):
            return mix(x, x.flip(0))
        partners = partners_of(inputs, batch, self.ranks.rank, share)
        start = mirrored(share, len(batch)).start
        return mix(x, self._transformed(partners, start, len(batch), names).flip(0))

    def _loss(
        self, outputs: Tensor, whole: Tensor, batch: Batch, epoch: int, mix: Mix | None, *, push: bool
    ) -> tuple[Tensor, Tensor]:
        """Return, for this rank's outputs, each sample's part of the whole loss and the gradient of the whole loss."""
        width = self.stage.projected
        order = torch.from_numpy(batch.order).to(self.device)
        before = sum(batch.sizes[: self.ranks.rank])
        after = before + len(outputs)
        everyone, y = outputs[..., :width], whole[order]
        if width:
            everyone = self.ranks.gather(everyone, batch.sizes)
        others = torch.cat([everyone[:before], everyone[after:]]) if width else everyone[:0]
        parts, own, of_others = outputs.new_zeros(0), torch.zeros_like(outputs), torch.zeros_like(others)
        if len(outputs):
            outputs.requires_grad_()
            others.requires_grad_()
            y_others = torch.cat([y[:before], y[after:]])
            total, parts = self._evaluate(outputs, y[before:after], whole, (others, y_others), epoch)
            if mix is not None:
                other = whole.flip(0)
                more, rest = self._evaluate(outputs, other[order][before:after], other, (others, y_others), epoch)
                total = mix.share * total + (1.0 - mix.share) * more
                parts = torch.cat([mix.share * parts, (1.0 - mix.share) * rest])
            leaves = [outputs, others, *self.of_objective]
            with of_loss(self.stage.settings.loss.entry, "its gradient"):
                own, of_others, *grads = torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)
            for parameter, grad in zip(self.of_objective, grads, strict=True):
                parameter.grad = self.precision.scaled(grad)
        if width:
            total_grad = torch.cat([of_others[:before], own[..., :width], of_others[before:]])
            self.ranks.sum_([total_grad])
            own = torch.cat([total_grad[before:after], own[..., width:]], dim=-1)
        if self.queue is not None and push:
            self.queue.push(torch.empty_like(everyone).index_copy_(0, order, everyone.detach()), whole)
        return parts.detach(), own

    def _evaluate(
        self, outputs: Tensor, y: Tensor, whole: Tensor, others: tuple[Tensor, Tensor], epoch: int
    ) -> tuple[Tensor, Tensor]:
        """Return the sum of this rank's parts of the loss, with its graph, and the parts."""
        width = self.stage.projected
        samples = Samples(
            y,
            whole,
            projections=outputs[..., :width] if width else None,
            logits=outputs[..., width:] if outputs.shape[-1] > width else None,
            reference=self._reference(*others) if width else None,
            epoch=epoch,
            epochs=self.stage.settings.epochs,
        )
        with of_loss(self.stage.settings.loss.entry, "its forward"):
            found = self.stage.objective(samples)
            total, parts = found if isinstance(found, tuple) else (found.sum(), found)
        if parts.shape != y.shape:
            got = f"{type(self.stage.objective).__name__} returned parts of shape {tuple(parts.shape)}."
            raise InputError(f"{got} Return one number per sample, {tuple(y.shape)}.")
        return total, parts

    def _reference(self, others: Tensor, y_others: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return the features of the other ranks and of the queue, with labels, or None if there are none."""
        past = self._past
        if not len(others):
            return past
        views = others.shape[1] if others.ndim == 3 else 1
        others, y_others = others.reshape(-1, others.shape[-1]), y_others.repeat_interleave(views)
        return (others, y_others) if past is None else (torch.cat([others, past[0]]), torch.cat([y_others, past[1]]))

    def _sum_gradients(self, loss: Tensor) -> Tensor | None:
        """Sum the gradients and the loss over all ranks. Return how many of the ranks are asked to stop."""
        if self.ranks.size == 1:
            return None
        stops = torch.tensor([STOPPING.requested], dtype=torch.float32, device=self.device)
        there = torch.tensor([p.grad is not None for p in self.parameters], dtype=torch.float32, device=self.device)
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        self.ranks.sum_([*grads, there, loss, stops])
        if any(p.grad is None for p in self.parameters):
            # A rank without a share has no gradients. If no rank used a weight, its gradient stays None, so that the
            # optimizer skips it.
            for parameter, grad, used in zip(self.parameters, grads, there.tolist(), strict=True):
                parameter.grad = grad if used else None
        return stops


def _backward(outputs: Tensor, grad: Tensor) -> None:
    if outputs.requires_grad:
        outputs.backward(grad.to(outputs.dtype))  # type: ignore[no-untyped-call]


class Sharpness:
    """Computes the gradients of sharpness-aware minimisation, SAM (Foret et al., 2021), batch by batch.

    SAM minimises the largest loss within a radius rho of the weights w. A step has two passes:

    1. The gradient g of the loss at w. The weights climb to w + e with e = rho g / |g|, where |g| is the norm over all
       weights.
    2. The gradient at w + e. The weights return to w, and the optimizer takes its step with this gradient.

    Both passes use the same batch, augmentation, mixture, dropout masks and queue. Only the first pass changes the
    running statistics of batch norm and the queue. Gradients are summed over the ranks before the climb, so all ranks
    climb to the same weights. A scale of the gradients, as float16 needs it, cancels in e. If they overflow, there is
    no climb, the second pass overflows as well, and the step is skipped.
    """

    def __init__(self, step: Step, rho: float) -> None:
        self.step, self.rho = step, rho

    def gradients(self, batch: Batch, inputs: Tensor, epoch: int, index: int) -> Found:
        """Store the gradients at the climbed weights in the parameters. Return the loss before the climb."""
        step, names = self.step, ("dropout", self.step.stage.name, epoch, index, "rank", self.step.ranks.rank)
        with seeded(step.device, step.seed, *names):
            found = step.gradients(batch, inputs, epoch, index)
        weights = [weight for weight in step.parameters if weight.grad is not None]
        before = [weight.detach().clone() for weight in weights]
        climb(weights, self.rho, step.ranks)
        for weight in weights:
            weight.grad = None
        try:
            with step.statistics.kept(), seeded(step.device, step.seed, *names):
                step.gradients(batch, inputs, epoch, index, again=True)
        finally:
            with torch.no_grad():
                for weight, value in zip(weights, before, strict=True):
                    weight.copy_(value)
        return found


def climb(weights: Sequence[Tensor], rho: float, ranks: Ranks) -> None:
    """Add rho g / |g| to the weights, in place. Without a gradient, or if it is not finite, they stay as they are."""
    grads = [weight.grad for weight in weights if weight.grad is not None]
    if not grads:
        return
    with torch.no_grad():
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
        if ranks.size > 1:  # Gradients in another memory layout have another rounding of the norm.
            norm = ranks.gather(norm[None], [1] * ranks.size)[0]
        scale = rho / (norm + 1e-12)  # The authors' code adds the same number.
        finite = norm.isfinite()  # A tensor: the host does not wait for the device.
        for weight, grad in zip(weights, grads, strict=True):
            weight.add_(torch.where(finite, grad * scale, 0.0))
