"""Evaluate all held-out samples of a loader together after the last batch.

Every rank has all samples and computes the same numbers, so nothing is merged. Means are over all samples, tokens or
steps, whatever the batches are. Metrics that are not means, such as the area under a curve, are exact as well.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import lightning as L
import torch
from lightning.pytorch import Callback
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lightning_realloc.algorithms.base.rollout_columns import Dialogue
from lightning_realloc.batch.samples import Column, Samples, all_samples
from lightning_realloc.dataflow.dataflow import ModelFunctionCall
from lightning_realloc.errors import ConfigError, DataError, ReallocError
from lightning_realloc.generation import Engine, SamplingParams
from lightning_realloc.scores.bootstrap import intervals
from lightning_realloc.scores.question_scores import EVALUATION, NUM_QUESTIONS, QuestionScores, interval_names
from lightning_realloc.trainers import trainer_callbacks

log = logging.getLogger(__name__)


class EvaluatingCallback(Callback):
    """A callback that has the role ``actor`` respond to prompts of its own; every algorithm then can generate."""


class EvaluationTask(Protocol):
    """Prompts of a callback that a module responds to."""

    def respond(self, module: Any, engine: Engine, prompts: Samples) -> Samples: ...
    def judge(self, module: Any, samples: Samples) -> Mapping[str, Column]: ...


class EvaluatedModule(L.LightningModule):
    """A LightningModule whose ``validate``, ``test`` and ``predict`` run some of its calls on held-out samples.

    A subclass that defines ``on_validation_epoch_end`` or ``on_test_epoch_end`` calls ``super()``, which logs.
    """

    evaluation_calls: tuple[str, ...] = ()
    """Calls that ``validate`` and ``test`` run on held-out prompts."""
    batch_columns: tuple[str, ...] = ()
    """Columns that a batch must have."""
    excluded_by: tuple[str, ...] = ()
    """Columns whose NaN excludes a sample from a loss that needs them; its tokens are then not in
    ``totals.num_tokens``."""
    data_module: str = "one of its data modules"
    """Data module of such batches, for error messages."""

    def __init__(self) -> None:
        super().__init__()
        self._held_out: dict[int, list[Samples]] = {}
        """Loader -> results of the current evaluation: columns of one value per sample, and lengths."""
        self.question_scores: dict[str, QuestionScores] = {}
        """Scores of the latest evaluations by the beginning of their metrics' names: ``val``, ``test``, and with
        several loaders ``val/dataloader_idx_1``."""

        self._task: EvaluationTask | None = None
        """Prompts of a callback that are responded to now; None: none."""

    # ---- prompts of callbacks
    @property
    def training_now(self) -> bool:
        """Whether calls are for training."""
        return bool(self.trainer.training) and self._task is None

    def run_evaluation(self, task: EvaluationTask, prompts: Samples, calls: Sequence[ModelFunctionCall]) -> Samples:
        """Run calls on the prompts of a callback, and return the responses, the same on every rank, sorted by id."""
        self._task = task
        try:
            made: Samples = self._strategy.run_calls(prompts, calls)
        finally:
            self._task = None
        return made.to("cpu").sorted_by_id()

    def evaluation_rollout(self, engine: Engine, prompts: Samples) -> Samples:
        """Respond to prompts of a callback: the method of its generating call."""
        assert self._task is not None, "run_evaluation() sets it"
        return self._task.respond(self, engine, prompts)

    def evaluation_rewards(self, samples: Samples) -> Mapping[str, Column]:
        """Reward responses to prompts of a callback."""
        assert self._task is not None, "run_evaluation() sets it"
        return self._task.judge(self, samples)

    # ---- what a subclass says about itself
    def held_out_dialogue(self, engine: Engine, prompts: Samples, sampling: SamplingParams) -> Dialogue | None:
        """Return the environment that answers responses to held-out prompts; None without one."""
        return None

    def response_ends(self) -> frozenset[int] | None:
        """Return the tokens that may end a response, if reward functions read all other special tokens; else None."""
        return None

    def check_batch(self, batch: Samples) -> None:
        """Raise for a batch that the algorithm cannot use; runs before its calls."""

    def require_batch(self, batch: object) -> None:
        """Raise DataError unless the loader's batch is samples with the required columns."""
        name, way_out = type(self).__name__, f"give trainer.fit(model, {self.data_module}(data, batch_size=...))"
        if not isinstance(batch, Samples):
            raise DataError(
                f"{name} works on batches of lightning_realloc's Samples, and the loader gave a "
                f"{type(batch).__name__}; {way_out}"
            )
        given = {*batch.columns, *batch.data}
        missing = [column for column in self.batch_columns if column not in given]
        if missing:
            raise DataError(
                f"{name} needs {', '.join(missing)}, and the batch has {', '.join(sorted(given))}; {way_out}"
            )

    def prepare_batch(self, batch: Samples) -> Samples:
        """Return the batch for the calls: the same one, or with further samples or columns.

        Every rank must do the same. Samples whose column ``trained`` (B,) is False take no part in training calls.
        """
        return batch

    def summarize(self, samples: Samples) -> dict[str, Tensor]:
        """Return metrics of the samples of an iteration or evaluation, the same on every rank.

        The samples have every column of one value per sample, and the lengths of sequences.
        """
        return {}

    def summarize_evaluation(self, samples: Samples) -> dict[str, Tensor]:
        """Return metrics of all held-out samples for ``validate`` and ``test``; see :meth:`summarize`."""
        return self.summarize(samples)

    def summarize_questions(self, samples: Samples) -> QuestionScores | None:
        """Return the scores of all held-out questions for ``validate`` and ``test``; None if there are none."""
        return None

    def prediction_calls(self, batch: Samples) -> tuple[str, ...]:
        """Return the calls that ``predict`` runs on a batch; raise for an unusable batch."""
        self.check_batch(batch)
        return self.evaluation_calls

    # ---- Lightning's hooks
    def configure_callbacks(self) -> list[Callback]:
        """Return a callback that shortens errors under strategies that do not do so themselves."""
        return [] if _runs_calls(self.trainer.strategy) else [_ShortTraceback()]

    def setup(self, stage: str) -> None:
        """Refuse a Trainer with another strategy, before it moves or divides a model."""
        if self._trainer is None:
            return
        _ = self._strategy
        callbacks = trainer_callbacks(self.trainer)
        if stage == "fit" and not any(isinstance(one, EvaluatingCallback) for one in callbacks):
            self._refuse_monitors(callbacks)

    def validation_step(self, batch: Samples, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Run the evaluation calls on held-out samples; ``val/...`` is logged after the last batch."""
        self._evaluate(batch, dataloader_idx)

    def test_step(self, batch: Samples, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Run the evaluation calls on held-out samples; ``test/...`` is logged after the last batch."""
        self._evaluate(batch, dataloader_idx)

    def predict_step(self, batch: Samples, batch_idx: int, dataloader_idx: int = 0) -> Samples:
        """Return the samples with the results of the evaluation calls."""
        self.require_batch(batch)
        names = self.prediction_calls(batch)
        samples: Samples = self._strategy.run_calls(self.prepare_batch(batch), names)
        return samples

    def on_validation_epoch_start(self) -> None:
        """Discard the results of an evaluation that did not finish."""
        self._held_out.clear()

    def on_test_epoch_start(self) -> None:
        """See :meth:`on_validation_epoch_start`."""
        self._held_out.clear()

    def on_validation_epoch_end(self) -> None:
        """Log ``val/...`` for all held-out samples."""
        self._log_evaluation("val")

    def on_validation_end(self) -> None:
        """In Lightning's check before training, warn of callbacks whose metric no validation logs."""
        if self.trainer.sanity_checking:
            self._warn_of_unknown_monitors()

    def on_test_epoch_end(self) -> None:
        """Log ``test/...`` for all held-out samples."""
        self._log_evaluation("test")

    def _evaluate(self, batch: Samples, loader: int) -> None:
        if not self.evaluation_calls:
            raise ConfigError(f"{type(self).__name__} declares no evaluation_calls; leave the validation data out")
        self.require_batch(batch)
        self.check_batch(batch)
        made = self._strategy.run_calls(self.prepare_batch(batch), self.evaluation_calls)
        self._held_out.setdefault(loader, []).append(made.lengths_only())

    def _log_evaluation(self, prefix: str) -> None:
        by_loader, self._held_out = self._held_out, {}
        for loader, batches in by_loader.items():
            samples = all_samples(batches)
            suffix = f"/dataloader_idx_{loader}" if len(by_loader) > 1 else ""  # as Lightning names them
            found: dict[str, Any] = dict(self.summarize_evaluation(samples))
            scores = self.summarize_questions(samples)
            ends: dict[str, Any] = {}
            if scores is not None and scores.questions:
                self.question_scores[f"{prefix}{suffix}"] = scores
                for name, score in intervals(scores).items():
                    found[name] = score.value
                    ends |= dict(zip(interval_names(name), (score.low, score.high), strict=True))
                ends[NUM_QUESTIONS] = float(len(scores.questions))
            for metrics, is_shown in ((found, True), (ends, False)):
                # Samples are on the host, whose tensors NCCL cannot average.
                named = {f"{prefix}/{k}{suffix}": torch.as_tensor(v).to(self.device) for k, v in metrics.items()}
                # Lightning would add the index of the last loader, and refuses names that have one.
                self.log_dict(
                    named, prog_bar=is_shown, batch_size=len(samples), sync_dist=True, add_dataloader_idx=False
                )

    def _warn_of_unknown_monitors(self) -> None:
        results = self.trainer._results
        logged = {} if results is None else results.metrics(on_step=False)["callback"]
        for callback in trainer_callbacks(self.trainer):
            monitor = getattr(callback, "monitor", None)
            if isinstance(monitor, str) and monitor.startswith("val/") and monitor not in logged:
                rank_zero_warn(
                    f"{type(callback).__name__}(monitor={monitor!r}) waits for a metric that the validation before "
                    f"training did not log; it logged {', '.join(sorted(logged)) or 'none'}"
                )

    @staticmethod
    def _refuse_monitors(callbacks: Iterable[Callback]) -> None:
        """Raise ConfigError for a callback that monitors an evaluation set, in a fit without any."""
        for callback in callbacks:
            monitor = getattr(callback, "monitor", None)
            if isinstance(monitor, str) and monitor.startswith(EVALUATION):
                raise ConfigError(
                    f"{type(callback).__name__}(monitor={monitor!r}) waits for a metric of an evaluation set, and the "
                    f"Trainer has none; add callbacks=[Evaluation(...)]"
                )

    @property
    def _strategy(self) -> Any:
        strategy = self.trainer.strategy
        if not _runs_calls(strategy):
            raise ConfigError(
                f"{type(self).__name__} needs Trainer(strategy='realloc'), which runs its calls; "
                f"this Trainer has {type(strategy).__name__}"
            )
        return strategy


class _ShortTraceback(Callback):
    """Drops Lightning's frames from this package's errors, so that the error is not below a page of them."""

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Forget where an error of this package was raised; the frames that the exception still leaves are added."""
        if isinstance(exception, ReallocError):
            log.debug("the error that ends this run was raised here", exc_info=exception)
            exception.__traceback__ = None


def _runs_calls(strategy: object) -> bool:
    return hasattr(strategy, "run_iteration")
