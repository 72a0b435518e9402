"""Phase hooks: additional callback hooks around every call of a dataflow, and around evaluations of named sets."""

from __future__ import annotations

from collections.abc import Mapping

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_realloc.runtime.transfer.executor import ReallocationReport
from lightning_realloc.scores.question_scores import QuestionScores


class PhaseCallback(Callback):
    """Callback with hooks for every call of an iteration, a phase; override the hooks you need.

    The module's ``self.log`` works in all of them, except in prediction, where Lightning logs nothing. Any other
    callback may define the same methods.

    Example:
        >>> from lightning_realloc import PhaseCallback
        >>> class PrintPhases(PhaseCallback):
        ...     def on_phase_start(self, trainer, pl_module, phase):
        ...         print(phase)  # "actor.generate", "reward.infer", "actor.train", ...
    """

    def on_phase_start(self, trainer: Trainer, pl_module: LightningModule, phase: str) -> None:
        """Called on every rank before the call ``phase``, such as ``"actor.generate"``, also if it takes no part."""

    def on_phase_end(self, trainer: Trainer, pl_module: LightningModule, phase: str) -> None:
        """Called on every rank after the call ``phase``."""

    def on_reallocate(
        self, trainer: Trainer, pl_module: LightningModule, phase: str, report: ReallocationReport
    ) -> None:
        """Called on every rank after weights were moved for the call ``phase``."""

    def on_evaluation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Called on every rank before `Evaluation` evaluates its sets."""

    def on_evaluation_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        metrics: Mapping[str, float],
        scores: Mapping[str, QuestionScores],
    ) -> None:
        """Called on every rank after that.

        Args:
            metrics: Metrics by full name, such as ``eval/gsm/accuracy``.
            scores: Beginning of metrics' names, such as ``eval/gsm`` -> scores per question.
        """
