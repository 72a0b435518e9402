"""An executor without a model, for tests of the generation loop."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from lightning_realloc.generation.core.params import SamplingParams
from lightning_realloc.generation.core.step import DrawRule, Emitted, ForwardStep


@dataclass
class CopyingExecutor:
    """Emits after each token the next number, and accepts drafted tokens that say so.

    Slots hold the tokens whose keys and values a model would hold. A step that reads a token twice, or leaves one out,
    fails.
    """

    replays_steps: bool = False
    was_usual: bool = True
    capture_s: float = 0.0
    cache_bytes: int = 0
    slots: defaultdict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    steps: list[ForwardStep] = field(default_factory=list)

    def begin(self, params: SamplingParams, rule: DrawRule | None) -> None:
        """Forget all slots."""
        self.slots.clear()

    def submit(self, step: ForwardStep) -> None:
        """Read the step's tokens."""
        self.steps.append(step)
        for prefill in step.prefills:
            for slot in prefill.slots:
                held = self.slots[slot][: prefill.begin]
                assert len(held) == prefill.begin, f"slot {slot} holds {len(held)} of {prefill.begin} positions"
                self.slots[slot] = [*held, *prefill.tokens]
        for slot, row in enumerate(step.rows()):
            held = self.slots[slot][: row.position]
            assert held == list(step.running[slot].tokens(0, row.position)), f"slot {slot} holds other tokens"
            self.slots[slot] = [*held, *row.tokens]

    def collect(self) -> list[Emitted]:
        """Return the next numbers."""
        emitted: list[Emitted] = []
        for sample, draft in zip(self.steps[-1].running, self.steps[-1].drafts, strict=True):
            tokens = [sample.last_token + 1]
            for drafted in draft.tokens:
                if drafted != tokens[-1]:
                    break
                tokens.append(drafted + 1)
            emitted.append((tokens, [-1.0] * len(tokens)))
        return emitted

    def make_room(self, length: int, num_slots: int = 0) -> None:
        """Do nothing: lists grow."""

    def copy(self, source: int, targets: Sequence[int], length: int) -> None:
        """Copy the beginning of a slot."""
        self.slots.update({target: self.slots[source][:length] for target in targets})

    def move(self, source: int, target: int, length: int) -> None:
        """Move a slot."""
        self.slots[target] = self.slots.pop(source)[:length]

    def swap(self, first: int, second: int, length: int) -> None:
        """Exchange two slots."""
        self.slots[first], self.slots[second] = self.slots[second], self.slots[first]
