"""Process reward model: one score per step of a response, learned from labels of steps."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from lightning_realloc.algorithms.base.calls import compute, infer, train
from lightning_realloc.algorithms.base.loaded_weights import ModelSource
from lightning_realloc.algorithms.base.module import ModuleSettings, MultiModelModule
from lightning_realloc.algorithms.base.role import Role
from lightning_realloc.algorithms.losses.functional import sequence_sums
from lightning_realloc.algorithms.losses.preference_losses import step_loss
from lightning_realloc.algorithms.settings import Unpack, check_minibatches
from lightning_realloc.batch.packing import PackedBatch
from lightning_realloc.batch.samples import Column, Ragged, Samples
from lightning_realloc.batch.training import Average, Loss, Totals
from lightning_realloc.errors import ConfigError, DataError
from lightning_realloc.runtime.parallel.packed_forward import packed_logits


class ProcessReward(MultiModelModule):
    """Train a model to classify steps as right or wrong, at the token that ends each step.

    Batches have ``step_ends`` and ``step_labels`` for every response token; see :class:`StepDataModule`.

    Source: Lightman et al., arXiv:2305.20050; Uesato et al., arXiv:2211.14275.

    Args:
        reward: The model: a Hugging Face name or folder, a config, or a module. Without a head of one label per token
            it gets a new one. ``sigmoid(score)`` is the probability that a step is right.
        settings: Settings of :class:`MultiModelModule`: learning rate, optimizer, schedule, tokenizer, seed.
    """

    evaluation_calls = ("reward.infer", "measure")
    default_learning_rate = 1e-5
    share_prompts = True
    batch_columns = ("prompt_ids", "response_ids", "step_ends", "step_labels")
    data_module = "StepDataModule"
    totals_of = ("num_steps",)

    def __init__(self, reward: ModelSource, **settings: Unpack[ModuleSettings]) -> None:
        super().__init__(**settings)
        self.sources["reward"] = reward

    def roles(self) -> tuple[Role, ...]:
        """Return the single model."""
        return (self.make_role("reward", trained=True, task="token_classification"),)

    def check_batch(self, batch: Samples) -> None:
        """Raise for a sample without a step, labels other than 0 and 1, and fewer samples than mini-batches."""
        steps, labels = sequence_sums(_as_floats(batch.ragged("step_ends"))), batch.ragged("step_labels").values
        if bool((steps == 0).any()):
            raise DataError(
                f"every sample needs a step to learn from; sample {int(batch.ids[int(steps.argmin())])} has none, "
                f"leave it out"
            )
        if not bool(((labels == 0) | (labels == 1)).all()):
            raise DataError("step_labels must be 1 where a step is right and 0 elsewhere")
        if self.trainer.training:
            check_minibatches(len(batch), self.train_options_of("reward"))

    def prepare_batch(self, batch: Samples) -> Samples:
        """Add the divisor of the mean over steps."""
        return batch.with_columns(num_steps=sequence_sums(_as_floats(batch.ragged("step_ends"))))

    @infer("reward", needs="batch", produces="step_scores")
    def score(self, reward: nn.Module, batch: PackedBatch) -> Tensor:
        """Return a score for every response token, for held-out data; those at the ends of steps are used."""
        return _scores(reward, batch)

    @compute(needs=("batch", "step_scores"), produces=("losses", "num_right"))
    def measure(self, samples: Samples) -> Mapping[str, Column]:
        """Return every sample's summed loss of steps, and its number of correct steps."""
        ends, labels = samples.ragged("step_ends"), samples.ragged("step_labels").values
        scores = samples.ragged("step_scores").values
        losses = step_loss(scores, labels, ends.values.bool())
        return {
            "losses": sequence_sums(Ragged(losses, ends.lengths)),
            "num_right": sequence_sums(Ragged(_right(scores, labels, ends.values.bool()), ends.lengths)),
        }

    @train("reward", needs="batch")
    def reward_loss(self, reward: nn.Module, batch: PackedBatch, totals: Totals) -> Loss:
        """Return one micro-batch's part of the mean cross-entropy per step."""
        ends, labels = batch["step_ends"].bool(), batch["step_labels"]
        scores = _scores(reward, batch)
        loss = step_loss(scores, labels, ends).sum()
        right = _right(scores.detach(), labels, ends).sum()
        return Loss(loss / totals.sums["num_steps"], {"accuracy": Average(right, ends.sum())})

    def summarize(self, samples: Samples) -> dict[str, Tensor]:
        """Return the mean loss per step and the share of correct steps, if they were measured."""
        if "losses" not in samples:
            return {}
        steps = samples.tensor("num_steps").sum()
        return {name: samples.tensor(column).sum() / steps for name, column in _MEASURED.items()}


_MEASURED = {"loss": "losses", "accuracy": "num_right"}


def _scores(reward: nn.Module, batch: PackedBatch) -> Tensor:
    """Return (N,) the score at each token."""
    scores = packed_logits(reward, batch)
    if scores.shape[1] != 1:
        raise ConfigError(f"reward gives {scores.shape[1]} labels for each token; give one with num_labels=1")
    return scores[:, 0].float()


def _right(scores: Tensor, labels: Tensor, ends: Tensor) -> Tensor:
    """Return (N,) 1.0 at the ends of steps whose score has the sign of the label."""
    return (ends & ((scores > 0) == (labels > 0.5))).float()


def _as_floats(column: Ragged) -> Ragged:
    return Ragged(column.values.float(), column.lengths)
