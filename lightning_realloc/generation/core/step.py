"""One step of a generation: the tokens that it reads and drafts, and the executor that runs it. No tensors.

The generation loop submits steps to a `StepExecutor` and collects tokens. The forward, the draw of tokens and the
verification of drafts lie behind this interface, and with them everything about how a model is run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

from lightning_realloc.generation.core.params import SamplingParams
from lightning_realloc.generation.core.sample import Sample

if TYPE_CHECKING:
    from torch import Tensor

Emitted = tuple[list[int], list[float]]
"""Tokens of one sample, and their log-probabilities."""
Forbidden = tuple[Sequence[int], Sequence[int]]
"""Rows of the logits, and the tokens that may not be drawn in them."""


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Tokens of a sequence whose keys and values are computed, without logits."""

    tokens: Sequence[int]
    slots: tuple[int, ...]
    """Slots that store the keys and values."""
    begin: int = 0
    """Position of the first token; the slots hold all positions before it."""
    extras: Mapping[str, Tensor] = field(default_factory=dict)
    """Further inputs of the model that belong to these tokens; see `ModelInput`."""


class DecodeRow(NamedTuple):
    """Tokens that the sample of one slot reads in a forward: its last one and the drafted ones."""

    tokens: Sequence[int]
    """At least one."""
    position: int
    """Position of the first token."""

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.position + len(self.tokens)


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens proposed to follow a sample's last one."""

    tokens: Sequence[int] = ()
    laws: Sequence[Tensor | tuple[int, ...]] = ()
    """Distribution that each token was drawn from: probabilities (V,), or equally likely tokens. Empty unless
    `Verification.needs_laws`."""

    def __len__(self) -> int:
        return len(self.tokens)

    def cut(self, length: int) -> Draft:
        """Return the first ``length`` tokens."""
        return Draft(self.tokens[:length], laws=self.laws[:length])


NO_DRAFT = Draft()


@dataclass(frozen=True, slots=True)
class ForwardStep:
    """Tokens that one forward reads, and the samples whose next tokens are drawn after it."""

    prefills: Sequence[PrefillChunk]
    """Tokens of prompts and of environments' answers."""
    running: Sequence[Sample] = ()
    """Running samples by slot; each reads its last token and its draft."""
    drafts: Sequence[Draft] = ()
    """A draft for each running sample."""
    forbidden: Forbidden | None = None
    """Tokens that may not be drawn."""

    def rows(self) -> list[DecodeRow]:
        """Return the tokens that each running sample reads."""
        pairs = zip(self.running, self.drafts, strict=True)
        return [DecodeRow((sample.last_token, *draft.tokens), sample.position) for sample, draft in pairs]


class DrawRule(Protocol):
    """Draws tokens from logits, and verifies drafts by them."""

    def emit(
        self, logits: Tensor, samples: Sequence[Sample], drafts: Sequence[Draft], forbidden: Forbidden | None
    ) -> list[Emitted]:
        """Return each sample's next tokens: at least one, at most one more than were drafted.

        ``logits`` (N, V) has, for every sample, one row after its last token and one after each drafted token.
        """


class StepExecutor(Protocol):
    """Runs the steps of one generation: the forward, the draw and the verification of drafts.

    It keeps keys and values in slots 0, 1, 2 …; a step's running samples are those of the first slots, in order. Each
    step is collected before slots change or another one is submitted; until then its samples do not change.
    """

    @property
    def replays_steps(self) -> bool:
        """Whether steps that read no prompts cost much less than others, so that prompts are worth reading together."""

    @property
    def was_usual(self) -> bool:
        """Whether the last step took as long as later ones of its size."""

    @property
    def capture_s(self) -> float:
        """Seconds of capturing steps as CUDA graphs in this generation."""

    @property
    def cache_bytes(self) -> int:
        """Bytes of keys and values that are held."""

    def begin(self, params: SamplingParams, rule: DrawRule | None) -> None:
        """Start a generation. ``rule`` draws; None: each token by the random number of its place, without drafts."""

    def submit(self, step: ForwardStep) -> None:
        """Start a step. Without any tokens it runs a dummy one, because a forward may be collective."""

    def collect(self) -> list[Emitted]:
        """Return the tokens of the submitted step's running samples; waits for them."""

    def make_room(self, length: int, num_slots: int = 0) -> None:
        """Reserve at least ``length`` positions in each slot, and at least ``num_slots`` slots."""

    def copy(self, source: int, targets: Sequence[int], length: int) -> None:
        """Copy the first ``length`` positions of a slot to others."""

    def move(self, source: int, target: int, length: int) -> None:
        """Move the first ``length`` positions of a slot to another."""

    def swap(self, first: int, second: int, length: int) -> None:
        """Exchange the first ``length`` positions of two slots."""
