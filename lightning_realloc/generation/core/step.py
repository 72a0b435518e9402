"""One step of a generation: the tokens that it reads and drafts, and the executor that runs it.

The generation loop submits steps to a `StepExecutor` and collects tokens. The forward, the draw of tokens and the
verification of drafts lie behind this interface, and with them everything about how a model is run. A step is a value:
nothing in it changes after it is made, and another process can run it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

from lightning_realloc.generation.core.params import SamplingParams
from lightning_realloc.generation.core.sample import Sample

if TYPE_CHECKING:
    from torch import Tensor

    from lightning_realloc.generation.cache.kv_cache import LayerShape

Emitted = tuple[list[int], list[float]]
"""Tokens of one sample, and their log-probabilities."""
Forbidden = tuple[Sequence[int], Sequence[int]]
"""Rows of the logits, and for each a token that may not be drawn in it."""


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
    positions: Tensor | None = None
    """(3, N) positions of the tokens in time, height and width; None: their places in the sequence."""


class DecodeRow(NamedTuple):
    """Tokens that the sample of one slot reads in a forward: its last one and the drafted ones.

    The fields from ``key`` on belong to the draw of the tokens that follow.
    """

    tokens: Sequence[int]
    """At least one."""
    position: int
    """Position of the first token."""
    key: int = 0
    """Key of the sample's random numbers, which differs between the samples of a generation."""
    place: int = 0
    """Place in the response of the first token to draw."""
    laws: Sequence[Tensor | tuple[int, ...]] = ()
    """As `Draft.laws`."""
    held: Sequence[int] = ()
    """Tokens of the sequence before the first one; empty without a repetition penalty."""
    shift: int = 0
    """What the model's positions of the tokens are more than their places; see `ModelInput.shift`."""

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.position + len(self.tokens)

    @property
    def drafted(self) -> Sequence[int]:
        """Tokens after the sample's last one."""
        return self.tokens[1:]


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


def decode_rows(samples: Sequence[Sample], drafts: Sequence[Draft], params: SamplingParams) -> list[DecodeRow]:
    """Return the rows of samples that read their last token and their draft."""
    penalizes = params.penalizes
    return [
        DecodeRow(
            (sample.last_token, *draft.tokens),
            sample.position,
            sample.key,
            len(sample.token_ids),
            draft.laws,
            sample.tokens(0, sample.position) if penalizes else (),
            sample.shift,
        )
        for sample, draft in zip(samples, drafts, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class ForwardStep:
    """Tokens that one forward reads, and the rows after which tokens are drawn."""

    prefills: Sequence[PrefillChunk] = ()
    """Tokens of prompts and of environments' answers."""
    rows: Sequence[DecodeRow] = ()
    """Tokens of running samples; row i belongs to slot i."""
    forbidden: Forbidden | None = None
    """Tokens that may not be drawn."""


class DrawRule(Protocol):
    """Draws tokens from logits, and verifies drafts by them."""

    def emit(self, logits: Tensor, rows: Sequence[DecodeRow], forbidden: Forbidden | None) -> list[Emitted]:
        """Return the next tokens of each row's sample: at least one, at most one more than were drafted.

        ``logits`` (N, V) are those after each token of each row.
        """


class StepExecutor(Protocol):
    """Runs the steps of one generation: the forward, the draw and the verification of drafts.

    It keeps keys and values in slots 0, 1, 2 … Each step is collected before slots change or another one is submitted.
    """

    @property
    def replays_steps(self) -> bool:
        """Whether steps that read no prompts cost much less than others, so that prompts are worth reading together."""

    @property
    def was_usual(self) -> bool:
        """Whether the step collected last took as long as later ones of its size."""

    @property
    def capture_s(self) -> float:
        """Seconds of capturing steps as CUDA graphs in this generation."""

    @property
    def cache_bytes(self) -> int:
        """Bytes of keys and values that are held, also after :meth:`end`."""

    def begin(self, params: SamplingParams, rule: DrawRule | None) -> None:
        """Start a generation. ``rule`` draws; None: each token by the random number of its place, without drafts."""

    def end(self, *, has_failed: bool = False) -> None:
        """End the generation, once after each `begin`; ``has_failed``: by an error, perhaps with a step in flight."""

    def submit(self, step: ForwardStep) -> None:
        """Start a step. Without any tokens it runs a dummy one, because a forward may be collective."""

    def collect(self) -> list[Emitted]:
        """Return the tokens of the submitted step's rows; waits for them."""

    def may_need(self, length: int) -> None:
        """Expect sequences of ``length`` positions, those of another rank's samples."""

    def make_room(self, length: int, num_slots: int = 0) -> None:
        """Reserve at least ``length`` positions in each slot, and at least ``num_slots`` slots."""

    def copy(self, source: int, targets: Sequence[int], length: int) -> None:
        """Copy the first ``length`` positions of a slot to others."""

    def move(self, source: int, target: int, length: int) -> None:
        """Move the first ``length`` positions of a slot to another."""

    def swap(self, first: int, second: int, length: int) -> None:
        """Exchange the first ``length`` positions of two slots."""

    def read(self, slot: int, begin: int, end: int) -> Tensor:
        """Return the keys and values of these positions as (bytes,) uint8 on the host."""

    def read_experts(self, slot: int, counted_from: int, end: int) -> Tensor | None:
        """Count the experts of a slot's positions from ``counted_from`` to ``end``; return those of all before ``end``.

        (end, layers * chosen experts) on the host; None if they are not recorded.
        """

    def write(self, slot: int, parts: Sequence[tuple[int, int, Tensor]], shapes: Sequence[LayerShape]) -> None:
        """Write (begin, end, content), as `read` returned it on a rank with layers of these shapes."""

    def describe(self) -> list[LayerShape] | None:
        """Return the shapes of the layers that `read` returns; empty before the first step.

        None: keys and values cannot be read here, and samples that move are read again.
        """
