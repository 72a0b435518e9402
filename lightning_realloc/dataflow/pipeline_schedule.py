"""Order of the passes of each stage of a training pipeline: 1F1B, and ZB-H1, which delays the gradients of weights.

Pure: ``runtime/parallel/pipeline.py`` runs the passes, and ``tuning`` estimates their idle time.

Sources: 1F1B: Narayanan et al., arXiv:2104.04473, section 2.2; ZB-H1: Qi et al., arXiv:2401.10241, section 2.1.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

ScheduleName = Literal["1f1b", "zero_bubble"]


class StagePass(NamedTuple):
    """One pass of a micro-batch through a stage, which then sends its result to a neighbouring stage."""

    kind: Literal["forward", "backward", "weights"]
    """"forward" sends hidden states to the next stage, "backward" their gradient to the one before. "weights" sends
    nothing: it computes gradients of weights that the backward pass has left out."""
    micro_batch: int
    expected: int | None = None
    """Micro-batch whose tensor arrives from the same neighbour, in the exchange that sends the result. That neighbour
    sends it in the same exchange, as NCCL requires. None: nothing arrives, or the pass that needs it receives it."""


def stage_passes(schedule: ScheduleName, stage: int, num_stages: int, count: int) -> tuple[StagePass, ...]:
    """Return the passes of a stage for ``count`` micro-batches.

    A stage holds activations of at most as many micro-batches as there are stages from it to the last. ZB-H1 delays the
    weights' gradients by as many micro-batches as there are stages before: with them, no stage holds more than the
    first. At the end they fill the time in which a stage waits for gradients.
    """
    ahead = num_stages - stage - 1
    passes = [StagePass("forward", number) for number in range(min(ahead, count))]
    for number in range(ahead, count):
        following = number + 1 if number + 1 < count else None
        passes.append(StagePass("forward", number, expected=number - ahead))
        passes.append(StagePass("backward", number - ahead, expected=following))
    passes += [StagePass("backward", number) for number in range(max(0, count - ahead), count)]
    return tuple(_with_weights(passes, delay=stage) if schedule == "zero_bubble" else passes)


def _with_weights(passes: list[StagePass], *, delay: int) -> list[StagePass]:
    made = []
    for one in passes:
        made.append(one)
        if one.kind == "backward" and one.micro_batch >= delay:
            made.append(StagePass("weights", one.micro_batch - delay))
    num_backward = sum(one.kind == "backward" for one in passes)
    return made + [StagePass("weights", number) for number in range(max(0, num_backward - delay), num_backward)]


def idle_turns(schedule: ScheduleName, num_stages: int, count: int) -> tuple[int, int]:
    """Return how often a stage idles for a forward with its backward pass, and for the gradients of weights.

    Seconds idle are the first, times those of both passes but for the weights' gradients, plus the second, times those
    of these gradients. ZB-H1 fills the pipeline's end with them, so its second number is negative.

    >>> idle_turns("1f1b", num_stages=4, count=8)
    (3, 3)
    >>> idle_turns("zero_bubble", num_stages=4, count=8)
    (3, -3)
    """
    turns = num_stages - 1
    return turns, turns if schedule == "1f1b" else -min(turns, count - 1)
