"""Divide the samples of a call into groups that take turns in a pipeline. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

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
