"""An executor without a model, for tests of the generation loop."""

from __future__ import annotations

import pickle
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from lightning_realloc.generation.core.step import DecodeRow, Emitted, ForwardStep, StepExecutor


@dataclass(eq=False)
class CopyingExecutor(StepExecutor):
    """Emits after each token the next number, and accepts drafted tokens that say so.

    Slots hold the tokens whose keys and values a model would hold. Sequences count up, so a step that reads a token
    twice, or leaves one out, fails. A step runs when it is collected, from bytes: executors that share a ``pipe`` can
    have one in flight each, and have to collect them in order.
    """

    replays_steps, was_usual, capture_s, cache_bytes = False, True, 0.0, 0
    pipe: deque[tuple[CopyingExecutor, bytes]] = field(default_factory=deque)
    slots: defaultdict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    steps: list[ForwardStep] = field(default_factory=list)
    ended: list[bool] = field(default_factory=list)

    def end(self, *, has_failed: bool = False) -> None:
        self.ended.append(has_failed)

    def submit(self, step: ForwardStep) -> None:
        self.pipe.append((self, pickle.dumps(step)))

    def collect(self) -> list[Emitted]:
        owner, sent = self.pipe.popleft()
        assert owner is self, "another executor's step was submitted earlier"
        step: ForwardStep = pickle.loads(sent)
        self.steps.append(step)
        for prefill in step.prefills:
            for slot in prefill.slots:
                held = self.slots[slot][: prefill.begin]
                assert len(held) == prefill.begin, f"slot {slot} holds {len(held)} of {prefill.begin} positions"
                self.slots[slot] = [*held, *prefill.tokens]
        return [self._emit(slot, row) for slot, row in enumerate(step.rows)]

    def _emit(self, slot: int, row: DecodeRow) -> Emitted:
        held, last = self.slots[slot][: row.position], row.tokens[0]
        assert held == list(range(last - row.position, last)), f"slot {slot} holds other tokens"
        self.slots[slot] = [*held, *row.tokens]
        num_accepted = next((i for i, token in enumerate(row.drafted) if token != last + 1 + i), len(row.drafted))
        return list(range(last + 1, last + num_accepted + 2)), [-1.0] * (num_accepted + 1)

    def copy(self, source: int, targets: Sequence[int], length: int) -> None:
        self.slots.update({target: self.slots[source][:length] for target in targets})

    def move(self, source: int, target: int, length: int) -> None:
        self.slots[target] = self.slots.pop(source)[:length]

    def swap(self, first: int, second: int, length: int) -> None:
        self.slots[first], self.slots[second] = self.slots[second], self.slots[first]
