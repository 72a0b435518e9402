"""Parts of an engine: its CUDA graphs, speculative decoding and rebalancing, and a check that they go together.

Speculation and rebalancing are imported where a call needs them: plain generation needs neither.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from torch import nn

from lightning_realloc.batch.model_input import ModelInput
from lightning_realloc.errors import GenerationError
from lightning_realloc.generation.cache.kv_cache import CapturableCache, KVCache, SlotCache
from lightning_realloc.generation.cache.paged_cache import PagedCache
from lightning_realloc.generation.core.model_config import vocabulary_of
from lightning_realloc.generation.core.plain_decoding import Decoding
from lightning_realloc.generation.forward.batch_invariant import TileGraphs
from lightning_realloc.generation.forward.cuda_graphs import CapturedForwards, StepGraphs
from lightning_realloc.generation.forward.expert_records import ExpertRecords
from lightning_realloc.generation.loop.environment import Conversation, Conversations, Environment
from lightning_realloc.runtime.messages.environment_waits import WaitMeter

if TYPE_CHECKING:
    from lightning_realloc.generation.rebalance.peers import Peers
    from lightning_realloc.generation.rebalance.protocol import Rebalancer
    from lightning_realloc.generation.speculative.config import Speculation
    from lightning_realloc.generation.speculative.drafter import Drafter

CudaGraphs = bool | Literal["collective"]
"""Steps that are captured: False, none; True, those of one rank; ``"collective"``, those of tensor parallelism, too."""


def build_cache(max_bytes: int | None, *, num_caches: int = 1) -> SlotCache | PagedCache:
    """Return one of the caches that share a bound on bytes; None: each slot has room for the longest sequence."""
    return SlotCache() if max_bytes is None else PagedCache(int(max_bytes), num_caches=num_caches)


def num_kept_slots(cache: KVCache, num_slots: int, num_samples: int) -> int:
    """Return how many samples, besides those that run, may keep slots while they wait for their environment.

    Pages are bounded by themselves; slots with room for the longest sequence are doubled at most, as the forecast of
    memory counts them.
    """
    waiting = max(0, num_samples - num_slots)
    return min(waiting, num_slots) if isinstance(cache, SlotCache) else waiting


def build_graphs(
    model: nn.Module,
    cache: CapturableCache,
    *,
    graphs: CudaGraphs,
    compile: str | None,
    is_invariant: bool,
    records: ExpertRecords | None,
) -> CapturedForwards[Any] | None:
    """Return captured forwards, which are kept between calls: of tiles where ``is_invariant``; None: none may be."""
    collective = graphs == "collective"
    if not graphs or (is_invariant and not isinstance(cache, SlotCache)):  # tiles read pages that their tokens name
        return None
    if is_invariant:
        return TileGraphs(model, cache, collective=collective)
    return StepGraphs(model, cache, compile=compile, collective=collective, records=records)


def build_decoding(
    model: nn.Module,
    speculation: Speculation | None,
    drafter: Drafter | None,
    *,
    agree: Callable[[Sequence[float]], Sequence[float]] | None,
    clock: Callable[[], float],
    cuda_graphs: bool,
) -> Decoding:
    """Return decoding with a drafter, or with the one that ``speculation`` names; plain decoding without both."""
    if speculation is None and drafter is None:
        return Decoding()
    from lightning_realloc.generation.speculative.config import Speculation
    from lightning_realloc.generation.speculative.drafter import Drafter
    from lightning_realloc.generation.speculative.registry import build_drafter
    from lightning_realloc.generation.speculative.speculator import Speculator

    if speculation is None:
        proposes = drafter is not None and type(drafter).propose is not Drafter.propose
        speculation = Speculation(drafter="none", num_draft_tokens=None if proposes else 0)
    drafter = drafter or build_drafter(speculation, model)
    drafter.cuda_graphs = cuda_graphs
    return Speculator(speculation, drafter, agree=agree, clock=clock, vocabulary=vocabulary_of(model))


def build_rebalancer(
    peers: Peers | None,
    *,
    agree: Callable[[Sequence[float]], Sequence[float]] | None,
    clock: Callable[[], float],
) -> Rebalancer | None:
    """Return the rebalancing of samples between ranks; None without other ranks."""
    if peers is None or not peers.others:
        return None
    from lightning_realloc.generation.rebalance.protocol import Rebalancer

    return Rebalancer(peers, agree=agree, clock=clock)


def build_conversations(
    environment: Environment,
    settings: Conversation | None,
    rebalancer: Rebalancer | None,
    *,
    vocabulary: int,
    clock: Callable[[], float],
    agree: Callable[[Sequence[float]], Sequence[float]] | None,
    asks: bool,
    waits: WaitMeter,
    place: Callable[[ModelInput], ModelInput],
) -> Conversations:
    """Return conversations; where samples move, those that ask on the rank where each began. See `Conversations`."""
    kind: Callable[..., Conversations] = partial(Conversations, asks=asks)
    if rebalancer is not None and asks:
        from lightning_realloc.generation.rebalance.home_conversations import HomeConversations

        kind = partial(HomeConversations, peers=rebalancer.peers)
    return kind(environment, settings, vocabulary=vocabulary, clock=clock, agree=agree, waits=waits, place=place)


def check_parts(speculation: object, drafter: object, peers: object, lockstep: object, poll_weights: object) -> None:
    """Raise GenerationError for parts of another kind, such as mappings from YAML, or that exclude each other."""
    if speculation is not None or drafter is not None:
        from lightning_realloc.generation.speculative.config import Speculation
        from lightning_realloc.generation.speculative.drafter import Drafter

        _check_part("speculation", speculation, Speculation)
        if drafter is not None and not isinstance(drafter, Drafter):
            raise GenerationError(
                f"drafter={drafter!r} must be a Drafter; name one by speculation=Speculation(drafter=...) instead"
            )
    if peers is not None:
        from lightning_realloc.generation.rebalance.peers import Peers

        _check_part("peers", peers, Peers)
    if peers is not None and poll_weights is not None:
        raise GenerationError(
            "samples cannot move between ranks that take newer weights at different steps; leave peers or "
            "poll_weights out"
        )
    if peers is not None and lockstep is not None:
        raise GenerationError(
            "ranks whose forwards wait for each other make every step together, so moving samples between them "
            "gains nothing; leave peers or lockstep out"
        )


def _check_part(name: str, given: object, kind: type) -> None:
    if given is not None and not isinstance(given, kind):
        raise GenerationError(f"{name}={given!r} is a {type(given).__name__}; write {kind.__name__}(...)")
