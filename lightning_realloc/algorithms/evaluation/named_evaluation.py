"""Callback that evaluates a model on named sets every few iterations, and in ``trainer.validate``."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NoReturn

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, Checkpoint, ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lightning_realloc.algorithms.base.evaluation import EvaluatingCallback
from lightning_realloc.algorithms.base.module import MultiModelModule
from lightning_realloc.algorithms.base.vocabulary import check_token_ids
from lightning_realloc.algorithms.evaluation.evaluation_set import EvaluationSet, LoadedSet, check_count
from lightning_realloc.algorithms.settings import check_type
from lightning_realloc.errors import ConfigError
from lightning_realloc.rewards.functions import RewardFunctions
from lightning_realloc.scores.question_scores import EVALUATION, QuestionScores
from lightning_realloc.trainers import dispatch, is_last_iteration, trainer_callbacks

_NAME = re.compile(r"[\w.-]+")


class Evaluation(EvaluatingCallback):
    """Evaluate the actor on named sets: before training, every few iterations, after the last one, and in ``validate``.

    It logs ``eval/NAME/accuracy``, ``eval/NAME/pass@k``, ``eval/NAME/maj@k``, the ends of their intervals, rewards and
    lengths. Training is the same with and without it. Algorithms that sample nothing, such as `SFT` and `DPO`, generate
    in the call ``actor.generate``, which a plan may place.

    Args:
        sets: Name -> set.
        every: Iterations between evaluations, for sets without their own number; None: none between the first and the
            last.
        at_start: Whether to evaluate the model before training.

    Example:
        >>> from lightning_realloc import Evaluation, EvaluationSet, exact_match
        >>> sums = EvaluationSet([{"prompt": "2 + 2 =", "answer": "4"}], reward=exact_match)
        >>> evaluation = Evaluation({"sums": sums}, every=50)  # Trainer(strategy="realloc", callbacks=[evaluation])
    """

    def __init__(self, sets: Mapping[str, EvaluationSet], *, every: int | None = None, at_start: bool = True) -> None:
        if not isinstance(sets, Mapping) or not sets:
            raise ConfigError(f"sets={sets!r} must name at least one set, as in {{'gsm': EvaluationSet(...)}}")
        for name, one in sets.items():
            if not isinstance(name, str) or _NAME.fullmatch(name) is None:
                raise ConfigError(
                    f"sets names {name!r}, which becomes part of metrics' names; use letters, digits, '_', '-' and '.'"
                )
            check_type(EvaluationSet, **{f"sets[{name!r}]": one})
        check_type(bool, at_start=at_start)
        check_count("every", every, "iterations; None evaluates before and after training")
        self.sets = dict(sets)
        self.every = every
        self.at_start = at_start
        self._loaded: tuple[LoadedSet, ...] = ()
        self._step: int | None = None
        """Iterations done before the latest evaluation in this fit; None before the first."""

    # ---- Lightning's hooks
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Read all sets, and raise for those that cannot be used, before models are loaded.

        Raises:
            ConfigError: for a module without an actor, a set that another `Evaluation` has, too, and a callback that
                monitors a score which no set has.
        """
        if stage not in ("fit", "validate"):
            return
        if not isinstance(pl_module, MultiModelModule) or not hasattr(trainer.strategy, "run_iteration"):
            raise ConfigError(
                f"Evaluation has the actor of an algorithm respond under Trainer(strategy='realloc'); this is "
                f"{type(pl_module).__name__} under {type(trainer.strategy).__name__}"
            )
        if all(role.name != "actor" for role in pl_module.roles()):
            raise ConfigError(
                f"Evaluation has the role actor respond, and {type(pl_module).__name__} has none; remove the callback"
            )
        self._refuse_repeated_names(trainer)
        self._loaded = tuple(one.load(name, pl_module) for name, one in self.sets.items())
        self._check_monitors(trainer, pl_module)
        self._step = None
        _put_before_checkpoints(trainer, self)
        for functions in self._functions():
            functions.trainer_state = pl_module.trainer_state
            functions.start()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Close the sets' reward functions."""
        for functions in self._functions():
            functions.close()
        self._loaded = ()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Raise DataError for rows of another tokenizer than the actor's."""
        assert isinstance(pl_module, MultiModelModule), "checked in setup"
        for one in self._loaded:
            check_token_ids(one.table, {"actor": pl_module.models()["actor"]})

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Evaluate the model before its first iteration; a resumed run goes on without."""
        if self.at_start and trainer.global_step == 0:
            self._evaluate_in_fit(trainer, pl_module, self._loaded)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: object) -> None:
        """Evaluate the sets that are due."""
        step = trainer.global_step
        if step == self._step:
            return  # this iteration took no step
        is_last = is_last_iteration(trainer)
        due = [one for one in self._loaded if is_last or step % (one.given.every or self.every or step + 1) == 0]
        if due:
            self._evaluate_in_fit(trainer, pl_module, due)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Evaluate all sets in ``trainer.validate``; validation in a fit has its own interval."""
        if trainer.state.fn == TrainerFn.VALIDATING:
            metrics = self._evaluate(trainer, pl_module, self._loaded)
            named = {name: value.float().to(pl_module.device) for name, value in metrics.items()}
            pl_module.log_dict(named, batch_size=1, sync_dist=True, add_dataloader_idx=False)

    # ---- inside
    def _evaluate_in_fit(self, trainer: Trainer, module: LightningModule, due: Iterable[LoadedSet]) -> None:
        """Evaluate sets, and log in any step: Lightning gives loggers the metrics of some steps only."""
        self._step = trainer.global_step
        trainer._logger_connector.log_metrics(self._evaluate(trainer, module, due))

    def _evaluate(self, trainer: Trainer, module: LightningModule, due: Iterable[LoadedSet]) -> dict[str, Tensor]:
        """Return the metrics of sets, which callbacks have received. Collective over all ranks."""
        assert isinstance(module, MultiModelModule), "checked in setup"
        metrics: dict[str, float] = {}
        scores: dict[str, QuestionScores] = {}
        dispatch(trainer, "on_evaluation_start")
        for one in due:
            samples = module.run_evaluation(one, one.table, one.calls(module))
            scores[one.prefix] = one.scores(module, samples)
            metrics |= one.metrics(module, samples, scores[one.prefix])
            for callback, monitor in _monitors(trainer):
                if monitor.startswith(f"{one.prefix}/") and monitor not in metrics:
                    _refuse_monitor(callback, monitor, [name for name in metrics if name.startswith(f"{one.prefix}/")])
        module.question_scores |= scores
        known = {name: torch.tensor(value, dtype=torch.float64) for name, value in metrics.items()}
        trainer._logger_connector._callback_metrics.update(known)
        dispatch(trainer, "on_evaluation_end", metrics, scores)
        return known

    def _functions(self) -> Iterable[RewardFunctions]:
        return [one.functions for one in self._loaded if one.functions is not None]

    def _refuse_repeated_names(self, trainer: Trainer) -> None:
        others = (one for one in trainer_callbacks(trainer) if isinstance(one, Evaluation) and one is not self)
        repeated = sorted(self.sets.keys() & {name for other in others for name in other.sets})
        if repeated:
            raise ConfigError(f"two Evaluation callbacks have a set {repeated[0]!r}; rename one of them")

    def _check_monitors(self, trainer: Trainer, module: MultiModelModule) -> None:
        """Raise ConfigError for callbacks that wait for a score of these sets which none of them has."""
        known = {name for one in self._loaded for name in one.score_names(module)}
        all_sets = {name for one in trainer_callbacks(trainer) if isinstance(one, Evaluation) for name in one.sets}
        for callback, monitor in _monitors(trainer):
            _, name, *score = monitor.split("/")
            is_other = bool(score) and re.match(r"accuracy|pass@|maj@", score[0]) is None
            if name not in all_sets or (name in self.sets and monitor not in known and not is_other):
                _refuse_monitor(callback, monitor, known)
            if name in self.sets:
                self._check_interval(callback, name)

    def _check_interval(self, callback: Callback, name: str) -> None:
        """Warn about a checkpoint callback that looks for a score in iterations without one."""
        steps, every = getattr(callback, "_every_n_train_steps", 0), self.sets[name].every or self.every
        if isinstance(callback, ModelCheckpoint) and steps and every and steps % every:
            rank_zero_warn(
                f"ModelCheckpoint(every_n_train_steps={steps}) finds scores of the set {name!r} in some iterations "
                f"only: it is evaluated every {every}; let every_n_train_steps be a multiple of {every}"
            )


def _monitors(trainer: Trainer) -> Iterator[tuple[Callback, str]]:
    """Yield the callbacks that wait for a metric of an evaluation set, with its name."""
    for callback in trainer_callbacks(trainer):
        monitor = getattr(callback, "monitor", None)
        if isinstance(monitor, str) and monitor.startswith(EVALUATION):
            yield callback, monitor


def _refuse_monitor(callback: Callback, monitor: str, known: Collection[str]) -> NoReturn:
    near = difflib.get_close_matches(monitor, known, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    raise ConfigError(
        f"{type(callback).__name__}(monitor={monitor!r}) waits for a metric that no evaluation set logs; "
        f"{hint}there are {', '.join(sorted(known))}"
    )


def _put_before_checkpoints(trainer: Trainer, callback: Evaluation) -> None:
    """Move a callback between all others and those that save checkpoints.

    It then finds an iteration recorded and averages of weights updated, and a checkpoint has its metrics. The list is
    replaced, because Lightning goes through the old one.
    """
    others = [one for one in trainer_callbacks(trainer) if one is not callback]
    first = next((place for place, one in enumerate(others) if isinstance(one, Checkpoint)), len(others))
    vars(trainer)["callbacks"] = [*others[:first], callback, *others[first:]]
