"""Groups of a call's samples that take turns in a pipeline: their division, and how they ask one environment."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from lightning_realloc.generation.core.sample import Sample
from lightning_realloc.generation.loop.environment import Answer, Conversations
from lightning_realloc.generation.loop.run import TurnQuestions
from lightning_realloc.generation.schedule.slot_plan import Prompt


def divide_prompts(prompts: Sequence[Prompt], num_groups: int) -> list[list[Prompt]]:
    """Return the prompts of each group, with about equal numbers of samples; those with the largest hints go first.

    A prompt's samples stay together, so that it is read once, unless the groups would become uneven: no group gets
    more than its share, rounded up.
    """
    groups: list[list[Prompt]] = [[] for _ in range(num_groups)]
    room = [-(-sum(len(prompt.samples) for prompt in prompts) // num_groups)] * num_groups
    for prompt in sorted(prompts, key=lambda prompt: -prompt.length_hint):
        samples = prompt.samples
        while samples:
            group = max(range(num_groups), key=lambda number: (room[number], -number))
            taken, samples = samples[: room[group]], samples[room[group] :]
            groups[group].append(replace(prompt, samples=taken))
            room[group] -= len(taken)
    return groups


def own_samples(prompts: Sequence[Prompt]) -> tuple[list[int], list[Prompt]]:
    """Return the places of a group's samples in the call, and its prompts with places in that list."""
    places = [place for prompt in prompts for place in prompt.samples]
    numbers = {place: number for number, place in enumerate(places)}
    return places, [replace(prompt, samples=tuple(map(numbers.__getitem__, prompt.samples))) for prompt in prompts]


@dataclass(slots=True)
class SharedConversations:
    """One call's conversations, and what its groups have to share."""

    conversations: Conversations
    """Conversations of all samples of the call, by their places in it."""
    received: dict[int, Answer] = field(default_factory=dict)
    """Place -> answer that its group has not taken."""
    idle: set[int] = field(default_factory=set)
    """Groups that have no samples to run."""
    num_groups: int = 1


class GroupConversations(TurnQuestions):
    """The part of `SharedConversations` that one group sees, by the places of its samples in the group.

    Args:
        places: Places of the group's samples in the call.
    """

    def __init__(self, shared: SharedConversations, group: int, places: Sequence[int]) -> None:
        self._shared, self._group, self._places = shared, group, places
        self._asked: dict[int, int] = {}
        """Place in the call -> place in the group, of samples that wait."""

    @property
    def waiting(self) -> bool:
        """Whether a sample of the group waits."""
        return bool(self._asked)

    @property
    def asked(self) -> Collection[int]:
        """Indices of the group's samples that wait."""
        return self._asked.values()

    @property
    def reply_s(self) -> float:
        """As `Conversations.reply_s`."""
        return self._shared.conversations.reply_s

    def ask(self, index: int, sample: Sample) -> bool:
        """As `Conversations.ask`."""
        place = self._places[index]
        if not self._shared.conversations.ask(place, sample):
            return False
        self._asked[place] = index
        return True

    def answers(self) -> list[Answer]:
        """As `Conversations.answers`; those for other groups are kept for them."""
        received = self._shared.received
        received.update({answer.index: answer for answer in self._shared.conversations.answers()})
        own = [place for place in self._asked if place in received]
        return [replace(received.pop(place), index=self._asked.pop(place)) for place in own]

    def mark_idle(self, is_idle: bool) -> None:
        """As `Conversations.mark_idle`: the call is idle when all groups are."""
        (self._shared.idle.add if is_idle else self._shared.idle.discard)(self._group)
        self._shared.conversations.mark_idle(len(self._shared.idle) == self._shared.num_groups)

    def wait(self, most_s: float) -> None:
        """As `Conversations.wait`, also for an answer to another group."""
        if not self._shared.received:
            self._shared.conversations.wait(most_s)

    def close(self) -> None:
        """Forget all open questions of all groups, which end together."""
        self._asked.clear()
        self._shared.received.clear()
        self._shared.conversations.close()
