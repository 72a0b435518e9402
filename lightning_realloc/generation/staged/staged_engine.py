"""Generate from a model in pipeline stages, with as many groups of samples under way as there are stages.

The last stage runs the loop of `GenerationEngine` for each group in turn. While it draws the tokens of one group, the
stages before it run others. A group's tokens depend on its samples alone, so they equal those of any other layout.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from lightning_realloc.generation.base_engine import EngineCall
from lightning_realloc.generation.core.model_config import check_supported
from lightning_realloc.generation.engine import GenerationEngine
from lightning_realloc.generation.engine_parts import build_cache, num_kept_slots
from lightning_realloc.generation.forward.attention import check_idle, slot_attention
from lightning_realloc.generation.forward.packed_linear import packed_linears
from lightning_realloc.generation.loop.run import Budget, GenerationRun, GenerationStats
from lightning_realloc.generation.loop.sample_access import SampleAccess
from lightning_realloc.generation.staged.commands import Closing, GroupCommand, Leaving, NewWeights, Opening
from lightning_realloc.generation.staged.groups import (
    GroupConversations,
    SharedConversations,
    divide_prompts,
    own_samples,
)
from lightning_realloc.generation.staged.stage_runner import LastStageRunner, StageRunner
from lightning_realloc.generation.staged.turns import GroupTurns
from lightning_realloc.runtime.parallel.stage_link import StageLink

R = TypeVar("R", bound=StageRunner)


class StageUpdates(Protocol):
    """Newer weights of one stage, which arrive while it generates."""

    def poll(self, prepare: Callable[[int], None]) -> int | None:
        """On the last stage: fill the weights with a newer version if there is one, and return it, else None.

        ``prepare`` is called with that version before the weights change.
        """

    def follow(self, version: int) -> None:
        """On the other stages: fill the weights with this version; waits for it."""


class StagedEngine(GenerationEngine):
    """Continuous batching over pipeline stages. The last stage generates; the others call `follow` meanwhile.

    Args:
        model: This rank's stage.
        link: Connects the stages.
        role: Name of the model among the `partners` of another engine, whose `follow` the other stages are in; None:
            they follow this engine.
        updates: Fills this stage with newer weights during a generation; None: they change between calls only.
        options: Of `GenerationEngine`, without ``cuda_graphs``, ``compile``, ``batch_invariant`` and
            ``poll_weights``. ``max_cache_bytes`` bounds the bytes of each stage; the groups have equal shares.
            Drafts are made on the last stage alone, where a draft model lies whole. ``peers``, on the last stage
            alone, are the last stages of other pipelines; samples that move are read again there.
    """

    def __init__(
        self,
        model: nn.Module,
        link: StageLink,
        *,
        role: str | None = None,
        updates: StageUpdates | None = None,
        max_cache_bytes: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(model, cuda_graphs=False, max_cache_bytes=max_cache_bytes, **options)
        self._link, self._role, self._updates = link, role, updates
        self._decodings = [self._decoding, *(self._decoding.for_other_samples() for _ in range(1, link.num_stages))]
        """Decoding of each group."""
        self._caches = [build_cache(max_cache_bytes, num_caches=link.num_stages) for _ in range(link.num_stages)]
        """Keys and values of each group on this stage."""

    @property
    def is_follower(self) -> bool:
        """Whether this rank follows the last stage, and generates nothing by itself."""
        return not self._link.is_last

    def release(self) -> None:
        """Free the storage of caches; the next call allocates it again."""
        super().release()
        for cache in self._caches:
            cache.release()

    # ---- stages before the last
    @torch.no_grad()
    def follow(self) -> bool:
        """Run this stage's part of all generations of a call; return False if the last stage failed.

        Raises:
            RankLost: if the last stage ended.
        """
        while isinstance(command := self._link.receive_command(), Opening):
            self._engine_of(command.role)._follow_generation(command)
        assert isinstance(command, Leaving), f"{command} is no command between two generations"
        return not command.has_failed

    def leave(self, *, has_failed: bool = False) -> None:
        """Let the other stages end their `follow`, on the last stage, once after each call."""
        self._link.command(Leaving(has_failed))
        if not has_failed:
            for role in (None, *self.partners):
                self._engine_of(role)._link.end()

    def _engine_of(self, role: str | None) -> StagedEngine:
        """Return the engine of a model which environments ask; None: this one."""
        engine = self if role is None else self.partners[role]
        assert isinstance(engine, StagedEngine), "models that environments ask lie in the layout of the call"
        return engine

    def _follow_generation(self, opening: Opening) -> None:
        self._link.begin()
        runners = [self._runner(StageRunner, opening, group) for group in range(self._link.num_stages)]
        if opening.version is not None:
            self._follow_weights(opening.version)
        with slot_attention(self._model), packed_linears(self._model, num_steps=opening.num_steps) as pack:
            while isinstance(command := self._link.receive_command(), GroupCommand | NewWeights | Opening):
                if isinstance(command, GroupCommand):
                    runners[command.group].follow(command)
                elif isinstance(command, NewWeights):
                    self._follow_weights(command.version)
                    pack()
                else:  # all samples wait for environments, which ask a model
                    with self.interrupted():
                        self._engine_of(command.role)._follow_generation(command)
        assert isinstance(command, Closing), f"{command} is no command in a generation"
        if not command.has_failed:  # else hidden states may be under way that nothing receives
            self._link.end()
        for runner in runners:
            runner.end(has_failed=command.has_failed)

    def _follow_weights(self, version: int) -> None:
        assert self._updates is not None, "all stages take newer weights, or none does"
        self._updates.follow(version)

    def _runner(self, kind: type[R], opening: Opening, group: int) -> R:
        cache, link, most = self._caches[group], self._link, opening.num_running + opening.num_kept
        sizes = {"num_slots": opening.num_slots, "longest": opening.longest, "most_slots": most}
        return kind(self._model, cache, **sizes, link=link, group=group, records=self._records)

    # ---- the last stage
    def _complete(self, call: EngineCall) -> GenerationStats:
        check_idle(self._model)
        opening = self._opening(call)
        check_supported(self._model, max_length=opening.longest)
        with self._commanding(opening), ExitStack() as session:
            turns, access = self._turns(call, self._budget(call, lambda: turns.ended), opening)
            session.enter_context(slot_attention(self._model))
            pack = session.enter_context(packed_linears(self._model, num_steps=opening.num_steps))
            for run in turns.runs:
                session.enter_context(run)
            self._take_turns(turns, access, call, pack)
        return _added([run.stats() for run in turns.runs])

    @contextmanager
    def _commanding(self, opening: Opening) -> Iterator[None]:
        """Begin a generation on all stages, and end it."""
        self._link.begin()
        self._link.command(opening)
        has_failed = True
        try:
            yield
            has_failed = False
        finally:
            self._link.command(Closing(has_failed))

    def _opening(self, call: EngineCall) -> Opening:
        """Return the sizes of a generation, which all stages and groups have."""
        samples, num_groups = call.samples, self._link.num_stages
        num_own = max(1, -(-len(samples) // num_groups))
        num_slots = self._num_slots(-(-self._max_slots // num_groups), num_own)
        num_kept = 0 if call.requests.environment is None else num_kept_slots(self._caches[0], num_slots, num_own)
        num_steps = self._num_packed_steps(samples, call.params)
        longest = max((sample.max_length for sample in samples), default=1)
        version = None if self._updates is None else self._version
        return Opening(min(num_slots, num_own), num_slots, num_kept, longest, num_steps, version, self._role)

    def _turns(self, call: EngineCall, budget: Budget, opening: Opening) -> tuple[GroupTurns, SampleAccess]:
        """Return a run for each group, with nothing admitted yet, and access to the samples of all."""
        asked, num_groups = call.requests, self._link.num_stages
        conversations = self._conversations(asked.environment, asked.conversation)
        shared = None if conversations is None else SharedConversations(conversations, num_groups=num_groups)
        groups = divide_prompts(asked.queue(call.samples), num_groups)
        runs, all_places = [], []
        for group, prompts in enumerate(groups):
            places, own = own_samples(prompts)
            samples = [call.samples[place] for place in places]
            waiting = [prompt for prompt in own if not call.stop.already_ends(samples[prompt.samples[0]])]
            executor, decoding = self._runner(LastStageRunner, opening, group), self._decodings[group]
            talks = None if shared is None else GroupConversations(shared, group, places)
            sizes = {"num_slots": opening.num_running, "num_kept": opening.num_kept}
            scheduler = self._scheduler(waiting, samples, executor, decoding, **sizes)
            pause_s, params, stop = self._max_pause_s(), call.params, call.stop
            runs.append(
                GenerationRun(executor, scheduler, samples, params, stop, decoding, talks, budget, max_pause_s=pause_s)
            )
            all_places.append(places)
        turns = GroupTurns(runs, conversations, self._lockstep, lambda: call.notifier.follow(turns.ended))
        return turns, SampleAccess(runs, call.samples, all_places)

    def _take_turns(self, turns: GroupTurns, access: SampleAccess, call: EngineCall, pack: Callable[[], None]) -> None:
        """Generate until all samples are finished, including those that arrive from other ranks."""
        self._rebalance(turns, access, call)
        while turns.goes_on:
            self._renew_weights(turns.runs, pack)
            turns.step()

    def _renew_weights(self, runs: Sequence[GenerationRun], pack: Callable[[], None]) -> None:
        """Let all stages take newer weights, if there are some, after the same steps."""

        def prepare(version: int) -> None:
            for run in runs:  # a step runs on the same weights in all stages
                run.collect_step()
            self._link.command(NewWeights(version))

        version = None if self._updates is None else self._updates.poll(prepare)
        if version is not None:
            for run in runs:
                run.weights_updated(self._version)
            self._version = version
            pack()


def _added(stats: Sequence[GenerationStats]) -> GenerationStats:
    """Return the sums of the groups' counts."""
    total: Counter[str] = Counter()
    for each in stats:
        total.update(asdict(each))
    return GenerationStats(**total)
