"""Which calls can begin with the first samples of a generation that goes on? Those that need nothing else.

On other ranks they begin with portions as they come; on the ranks that generate, with what is finished on a rank that
has nothing left to generate while others have.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from lightning_realloc.dataflow.dataflow import ModelFunctionCall
from lightning_realloc.layout.dims import Layout


def fused_sources(calls: Sequence[ModelFunctionCall], ranks: Mapping[str, Sequence[int]]) -> dict[str, str]:
    """Return fused call -> the generating call that it takes samples of.

    Fused are calls that infer, need what one generating call makes and nothing that another call makes, and run on
    other ranks than it.

    Args:
        calls: Of one iteration.
        ranks: Of every call with a model.
    """
    return {
        call.name: source.name
        for call, source in _reads_of_one_generation(calls)
        if set(ranks[call.name]).isdisjoint(ranks[source.name])
    }


def tail_sources(calls: Sequence[ModelFunctionCall], layouts: Mapping[str, Layout]) -> dict[str, str]:
    """Return call -> the generating call on whose ranks it can work on a rank's own samples before all are generated.

    Such calls infer, need what one generating call makes and nothing that another call makes, and run on the same
    ranks with another model. Both models are whole on each of several ranks: a pass waits for nobody. And no training
    call comes between the two, which may change the weights.

    Args:
        calls: Of one iteration, in the order in which they run.
        layouts: Of every call with a model.
    """
    place = {call.name: index for index, call in enumerate(calls)}
    sources = {}
    for call, source in _reads_of_one_generation(calls):
        ours, theirs = layouts[call.name], layouts[source.name]
        between = calls[place[source.name] : place[call.name]]
        are_whole = all(len(layout.ranks) == layout.dims.dp > 1 for layout in (ours, theirs))
        if (
            are_whole
            and set(ours.ranks) == set(theirs.ranks)
            and call.role != source.role
            and all(other.kind != "train" for other in between)
        ):
            sources[call.name] = source.name
    return sources


def _reads_of_one_generation(
    calls: Sequence[ModelFunctionCall],
) -> Iterator[tuple[ModelFunctionCall, ModelFunctionCall]]:
    """Yield (call, source): it infers, and needs what a generating call makes and nothing that another does."""
    for call in calls:
        makers = [maker for maker in calls if not set(call.needs).isdisjoint(maker.produces)]
        if call.kind == "infer" and len(makers) == 1 and makers[0].kind == "generate":
            yield call, makers[0]


def fused_first(calls: Sequence[ModelFunctionCall], fused: Collection[str]) -> tuple[ModelFunctionCall, ...]:
    """Return the calls with computations moved behind fused calls that follow them.

    A computation may wait for all samples, which would keep its rank from beginning with the first ones.
    """
    ordered: list[ModelFunctionCall] = []
    held: list[ModelFunctionCall] = []
    for call in calls:
        if call.kind == "compute":
            held.append(call)
        elif call.name in fused:
            ordered.append(call)
        else:
            ordered += [*held, call]
            held = []
    return (*ordered, *held)


def fused_groups(
    calls: Sequence[ModelFunctionCall], sources: Mapping[str, str], *, alone: Collection[str] = ()
) -> list[tuple[ModelFunctionCall, ...]]:
    """Return the calls in their order; fused ones of one source that follow each other are worked on together.

    Args:
        calls: In the order in which they run.
        sources: Of the fused ones, the generating call.
        alone: Roles whose models cannot be on the device beside others'.
    """
    groups: list[tuple[ModelFunctionCall, ...]] = []
    for call in calls:
        source = sources.get(call.name)
        before = groups[-1][-1] if groups else None
        joins = before is not None and source is not None and sources.get(before.name) == source
        if before is not None and joins and not {call.role, before.role}.intersection(alone):
            groups[-1] += (call,)
        else:
            groups.append((call,))
    return groups


BEFORE_FIRST_FINISHED = 0.5
"""The share of a generation's seconds after which samples begin to finish. An assumption: lengths decide, and slots."""


def portion_shares(num_parts: int) -> tuple[float, ...]:
    """Return what each portion takes of a generating call's seconds, from the one before it: samples finish evenly
    once the first of them do."""
    each = (1 - BEFORE_FIRST_FINISHED) / num_parts
    return (BEFORE_FIRST_FINISHED + each, *[each] * (num_parts - 1))
