"""Find the inference calls that can start on a generation's first samples, before it ends.

Such calls need no other input, run on other ranks, and process chunks as these arrive.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from lightning_realloc.dataflow.dataflow import ModelFunctionCall


def fused_sources(calls: Sequence[ModelFunctionCall], ranks: Mapping[str, Sequence[int]]) -> dict[str, str]:
    """Return fused call -> the generating call whose samples it reads.

    A fused call is an inference call that needs the products of one generating call and of no other call. It runs on
    other ranks than the generation.

    Args:
        calls: The calls of one iteration.
        ranks: Call with a model -> its ranks.
    """
    return {
        name: source for name, source in generation_readers(calls).items() if set(ranks[name]).isdisjoint(ranks[source])
    }


def generation_readers(calls: Sequence[ModelFunctionCall]) -> dict[str, str]:
    """Return inference call -> generating call, where the inference needs no product of any other call."""
    sources = {}
    for call in calls:
        makers = [maker for maker in calls if not set(call.needs).isdisjoint(maker.produces)]
        if call.kind == "infer" and len(makers) == 1 and makers[0].kind == "generate":
            sources[call.name] = makers[0].name
    return sources


def fused_first(calls: Sequence[ModelFunctionCall], fused: Collection[str]) -> tuple[ModelFunctionCall, ...]:
    """Return the calls with computations moved after the fused calls that follow them.

    A computation may wait for all samples, and would so keep its rank from starting on the first ones.
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
    """Return the calls in order, in groups; consecutive fused calls of one generation share a group.

    A chunk passes through all calls of its group before the next chunk does.

    Args:
        calls: The calls in the order in which they run.
        sources: Fused call -> its generating call.
        alone: Roles whose models cannot be on the device next to others.
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
"""Fraction of a generation's seconds after which samples begin to finish. An assumption; the true value depends on the
lengths and on the slots."""


def chunk_shares(num_chunks: int) -> tuple[float, ...]:
    """Return the fraction of a generating call's seconds between each chunk and the previous one.

    Samples finish at an even rate after `BEFORE_FIRST_FINISHED`.
    """
    each = (1 - BEFORE_FIRST_FINISHED) / num_chunks
    return (BEFORE_FIRST_FINISHED + each, *[each] * (num_chunks - 1))
