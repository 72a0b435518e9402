"""Run steps on this rank's model: the forward, the draw of tokens, and the verification of drafts."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from lightning_realloc.generation.core.keyed_sampler import KeyedSampler
from lightning_realloc.generation.core.params import SamplingParams
from lightning_realloc.generation.core.step import DrawRule, Emitted, ForwardStep
from lightning_realloc.generation.forward.runner import ModelRunner


class ModelExecutor:
    """A `StepExecutor` on a `ModelRunner`: plain, captured or batch-invariant. The ranks of a tensor-parallel group
    have the same logits and random numbers, so each draws the same tokens.

    Args:
        runner: Runs the model, and keeps keys and values.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self._runner, self._cache = runner, runner.cache
        self._rule: DrawRule | None = None
        self._submitted: tuple[ForwardStep, Tensor] | None = None

    @property
    def replays_steps(self) -> bool:
        """Whether most steps that read no prompts are CUDA graphs."""
        return self._runner.replays_steps

    @property
    def was_usual(self) -> bool:
        """Whether the last forward took as long as later ones of its size: no graph was captured or is due."""
        return self._runner.was_usual

    @property
    def capture_s(self) -> float:
        """Seconds of capturing steps as CUDA graphs in this generation."""
        return self._runner.capture_s

    @property
    def cache_bytes(self) -> int:
        """Bytes of keys and values that are held."""
        return self._cache.num_bytes

    def begin(self, params: SamplingParams, rule: DrawRule | None) -> None:
        """Start a generation that draws by a rule; None: each token by the random number of its place."""
        self._rule = rule or KeyedSampler(params)

    def submit(self, step: ForwardStep) -> None:
        """Launch a step's forward."""
        self._submitted = step, self._runner.forward(step.prefills, step.rows())

    def collect(self) -> list[Emitted]:
        """Draw the tokens of the submitted step's running samples."""
        assert self._submitted is not None and self._rule is not None, "a step is submitted before it is collected"
        (step, logits), self._submitted = self._submitted, None
        return self._rule.emit(logits, step.running, step.drafts, step.forbidden) if step.running else []

    def make_room(self, length: int, num_slots: int = 0) -> None:
        """Reserve at least ``length`` positions in each slot, and at least ``num_slots`` slots."""
        self._runner.make_room(length, num_slots)

    def copy(self, source: int, targets: Sequence[int], length: int) -> None:
        """Copy the first ``length`` positions of a slot to others."""
        self._cache.copy(source, targets, length)

    def move(self, source: int, target: int, length: int) -> None:
        """Move the first ``length`` positions of a slot to another."""
        self._cache.move(source, target, length)

    def swap(self, first: int, second: int, length: int) -> None:
        """Exchange the first ``length`` positions of two slots."""
        self._cache.swap(first, second, length)
