"""Generate completions on the current weights of a Hugging Face model.

This module checks arguments and keeps state between calls; `GenerationRun` carries one call out.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from numbers import Real
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lightning_realloc.batch.samples import EXPERTS, Ragged, Samples
from lightning_realloc.errors import GenerationError
from lightning_realloc.generation.base_engine import Engine, EngineCall
from lightning_realloc.generation.cache.paged_cache import PagedCache
from lightning_realloc.generation.core.capabilities import CAPABILITIES
from lightning_realloc.generation.core.model_config import check_loaded, check_supported, vocabulary_of
from lightning_realloc.generation.core.params import SamplingParams, check_counts, check_kind
from lightning_realloc.generation.core.plain_decoding import Decoding
from lightning_realloc.generation.core.sample import Completion, Sample, Tokenizer
from lightning_realloc.generation.engine_parts import (
    CudaGraphs,
    build_cache,
    build_conversations,
    build_decoding,
    build_graphs,
    build_rebalancer,
    check_parts,
    num_kept_slots,
)
from lightning_realloc.generation.forward.attention import attention_given_back, check_idle, slot_attention
from lightning_realloc.generation.forward.batch_invariant import BatchInvariantRunner, check_invariant
from lightning_realloc.generation.forward.expert_records import ExpertRecords
from lightning_realloc.generation.forward.packed_linear import packed_linears
from lightning_realloc.generation.forward.runner import ModelRunner
from lightning_realloc.generation.loop.environment import (
    Agree,
    Conversation,
    Conversations,
    Environment,
    check_environment,
)
from lightning_realloc.generation.loop.run import Budget, GenerationRun, GenerationStats
from lightning_realloc.generation.loop.sample_access import SampleAccess
from lightning_realloc.generation.loop.streaming import PartialResults
from lightning_realloc.generation.schedule.paged_scheduler import PagedScheduler
from lightning_realloc.generation.schedule.scheduler import Scheduler
from lightning_realloc.generation.schedule.slot_plan import Prompt
from lightning_realloc.limits import MAX_PREFILL_TOKENS
from lightning_realloc.runtime.forward.routers import describe_missing_routers
from lightning_realloc.runtime.messages.mailbox import PROBE_INTERVAL_S
from lightning_realloc.runtime.parallel.tensor_parallel import tensor_parallel_group
from lightning_realloc.setting_hints import ENGINE_HINTS, suggest_settings

if TYPE_CHECKING:  # imported where they are used: plain generation needs none of these
    from lightning_realloc.generation.rebalance.handover import MigrationStats
    from lightning_realloc.generation.rebalance.pace import SteppedRun
    from lightning_realloc.generation.rebalance.peers import Peers
    from lightning_realloc.generation.speculative.config import Speculation
    from lightning_realloc.generation.speculative.drafter import Drafter

MAX_GROUP_PAUSE_S = PROBE_INTERVAL_S
"""Longest wait for environments in seconds, after which the first rank of a tensor-parallel group lets the others go
on. They wait in a collective, whose time-out must be longer."""


@suggest_settings(ENGINE_HINTS)
class GenerationEngine(Engine):
    """Continuous batching on a Hugging Face decoder, through transformers' attention registry.

    The engine uses the model in place. Each forward reads its parameters anew, so a weight update only has to happen
    between two calls. Completions depend on weights, prompts, ``params.seed`` and sample ids. Slots, batch composition
    and layout affect only the rounding of matrix products.

    Args:
        model: A causal language model. Nothing of it is copied, except packed weights during a call.
        tokenizer: Its end-of-sequence token ends responses, as the model's does; stop strings need it.
        max_slots: Samples that run at a time. With an ``environment``, as many further ones keep their keys and values
            while they wait for its answer; beyond these, waiting samples are read again after it.
        max_length: Most tokens of prompt and response together; None: the model's context.
        lockstep: For models whose forward is collective. Called before every step with whether this rank has work; it
            returns whether any rank has. A rank without work then runs a dummy token.
        speculation: Settings of speculative decoding; None: none, or, with a ``drafter``, a measured draft length.
        drafter: Replaces the drafter that ``speculation`` names.
        agree: For tensor-parallel models. Takes numbers of this rank, and returns those of the group's first rank on
            all of its ranks: seconds, and answers of an environment, which that rank asks for all.
        pack_weights: Let long generations on CPU copy linear layers' weights into the fastest order, and drop the
            copies at the end. False saves their memory.
        cuda_graphs: Capture steps that read no prompts, and replay each with one launch. ``"collective"``: also those
            of tensor-parallel models over NCCL. False saves the graphs' memory. Without effect on CPU, with
            ``lockstep``, and for models that cannot be captured; a warning names those.
        compile: Backend of ``torch.compile`` for the blocks of captured steps, such as ``"inductor"``: fewer kernels,
            and other rounding. Without effect where no step is captured. None: none.
        batch_invariant: Compute every token in forwards of the same shape. A sample's tokens and log-probabilities then
            have the same bits whatever else is generated, in whatever slots and chunks, and with any drafts under
            ``verification="match"``. Slower; weights are not packed. Not for ``lockstep`` or mixtures of experts.
        clock: Returns the seconds by which drafts are planned and ``stats`` counted. On a shared machine
            ``time.process_time`` describes this process better.
        max_prefill_tokens: Most tokens that one step reads besides those of running samples; longer prompts take
            several steps.
        max_cache_bytes: Most bytes of keys and values, including a draft model's. They are kept in pages, which
            sequences with the same beginning share. Samples without pages wait; some return theirs and are read again
            later. Tokens stay the same. None: every slot has room for the longest sequence.
        wall_clock: Returns the seconds for budgets and deadlines.
        poll_weights: Called before every step: fills the parameters with newer weights if there are some, and returns
            their version, else None. Keys and values of earlier tokens stay. Does not go with ``peers``. None: weights
            change between calls only.
        peers: Ranks that call `generate` at the same time, for other samples, on the same weights. Samples then move
            between the ranks so that all finish together, and every rank returns its own. Queued samples move; with
            ``Peers(moves="all")`` running ones do too. None: samples stay.
    """

    name = "native"
    capabilities = CAPABILITIES["native"]

    def __init__(
        self,
        model: nn.Module,
        *,
        tokenizer: Tokenizer | None = None,
        max_slots: int = 64,
        max_length: int | None = None,
        lockstep: Callable[[bool], bool] | None = None,
        speculation: Speculation | None = None,
        drafter: Drafter | None = None,
        agree: Agree | None = None,
        pack_weights: bool = True,
        cuda_graphs: CudaGraphs = True,
        compile: str | None = None,
        batch_invariant: bool = False,
        clock: Callable[[], float] = time.perf_counter,
        max_prefill_tokens: int = MAX_PREFILL_TOKENS,
        max_cache_bytes: int | None = None,
        wall_clock: Callable[[], float] = time.monotonic,
        poll_weights: Callable[[], int | None] | None = None,
        peers: Peers | None = None,
    ) -> None:
        """Allocate nothing before the first `generate`.

        Raises:
            GenerationError: for a model that the engine cannot run, and for settings that it cannot use.
        """
        super().__init__(model, tokenizer=tokenizer, max_slots=max_slots, max_length=max_length, agree=agree)
        check_supported(model, max_length=1)
        check_loaded(model)
        check_counts(max_prefill_tokens=max_prefill_tokens)
        check_counts(Real, optional=True, max_cache_bytes=max_cache_bytes)
        check_kind("batch_invariant", batch_invariant, bool, "True or False")
        if cuda_graphs not in (True, False, "collective"):
            raise GenerationError(f'cuda_graphs={cuda_graphs!r} must be True, False or "collective"')
        check_parts(speculation, drafter, peers, lockstep, poll_weights)
        if batch_invariant:
            check_invariant(model, is_collective=lockstep is not None, compile=compile)
        self._max_prefill_tokens = max_prefill_tokens
        self._lockstep = lockstep
        self._poll_weights = poll_weights
        self._wall_clock = wall_clock
        self._cache = build_cache(max_cache_bytes)
        graphs = cuda_graphs if lockstep is None else False
        self._records = ExpertRecords.of_model(model)
        self._graphs = build_graphs(
            model, self._cache, graphs=graphs, compile=compile, is_invariant=batch_invariant, records=self._records
        )
        self._batch_invariant = batch_invariant
        self._pack_weights = pack_weights and not batch_invariant
        self._decoding = build_decoding(model, speculation, drafter, agree=agree, clock=clock, cuda_graphs=bool(graphs))
        if agree is None:
            self._check_agreement(peers)
        self._rebalancer = build_rebalancer(peers, agree=agree, clock=clock)

    @property
    def migration_stats(self) -> MigrationStats | None:
        """Samples that moved from and to this rank in the last call, and their cost; None without peers."""
        return None if self._rebalancer is None else self._rebalancer.stats

    @property
    def expert_counts(self) -> Tensor | None:
        return None if self._records is None else self._records.counts

    def record_experts(self, is_recorded: bool) -> None:
        if self._records is not None:
            self._records.keeps = is_recorded
        elif is_recorded:
            raise GenerationError(describe_missing_routers(self._model))

    def with_experts(self, samples: Samples, completions: Sequence[Completion]) -> Samples:
        if self._records is None or not self._records.keeps:
            return samples
        is_finished = torch.tensor([each.finish_reason != "unfinished" for each in completions], dtype=torch.int64)
        lengths = is_finished * (samples.ragged("prompt_ids").lengths + samples.ragged("response_ids").lengths)
        records = self._records.routers.join([each.experts for each in completions], lengths.tolist())
        return samples.with_columns(**{EXPERTS: Ragged(records, lengths)})

    @contextmanager
    def sharing(self, partial_results: PartialResults | None = None) -> Iterator[None]:
        """Share finished responses and progress with other calls inside this context, and count experts anew."""
        if self._records is not None:
            self._records.counts = None
        with super().sharing(partial_results):
            yield

    @contextmanager
    def interrupted(self) -> Iterator[None]:
        """Enclose what another engine generates between two steps of a call, also from the same model."""
        with super().interrupted(), attention_given_back(self._model):
            yield

    def release(self) -> None:
        """Free the storage of cache and CUDA graphs; the next call allocates it again."""
        self._cache.release()
        if self._graphs is not None:
            self._graphs.release()

    def _announced(self) -> AbstractContextManager[None]:
        return nullcontext() if self._rebalancer is None else self._rebalancer.announced()

    def _check_extra_inputs(self, names: Sequence[str]) -> None:
        super()._check_extra_inputs(names)
        if self._batch_invariant:
            raise GenerationError(
                f"batch_invariant=True runs prompts in tiles of equal size, and the model's input {names[0]!r} belongs "
                f"to a whole prompt; leave batch_invariant out"
            )

    def _complete(self, call: EngineCall) -> GenerationStats:
        check_idle(self._model)
        run = self._begin(call, self._budget(call, lambda: run.ended))
        self._carry_out(run, call)
        return run.stats()

    def _begin(self, call: EngineCall, budget: Budget) -> GenerationRun:
        """Return a run with nothing admitted yet."""
        asked, samples, stop = call.requests, list(call.samples), call.stop
        conversations = self._conversations(asked.environment, asked.conversation)
        waiting = [prompt for prompt in asked.queue(samples) if not stop.already_ends(samples[prompt.samples[0]])]
        longest = max((sample.max_length for sample in samples), default=1)
        check_supported(self._model, max_length=longest)
        num_own = max(1, len(samples))
        num_slots = self._num_slots(self._max_slots, num_own)
        num_kept = 0 if conversations is None else num_kept_slots(self._cache, num_slots, num_own)
        kind = BatchInvariantRunner if self._batch_invariant else ModelRunner
        executor = kind(
            self._model,
            self._cache,
            num_slots=min(num_slots, num_own),
            longest=longest,
            most_slots=num_slots + num_kept,
            graphs=self._graphs,
            records=self._records,
        )
        scheduler = self._scheduler(waiting, samples, executor, self._decoding, num_slots=num_slots, num_kept=num_kept)
        return GenerationRun(
            executor,
            scheduler,
            samples,
            asked.params,
            stop,
            self._decoding,
            conversations,
            budget,
            max_pause_s=self._max_pause_s(),
        )

    def _num_slots(self, most: int, num_own: int) -> int:
        """Return how many samples may run, out of ``num_own`` and those that arrive."""
        return min(most, num_own) if self._rebalancer is None else most

    def _max_pause_s(self) -> float:
        """Return the longest wait for environments in one step."""
        if self._rebalancer is not None:
            return self._rebalancer.max_pause_s
        if self._lockstep is not None:
            return 0.0
        return math.inf if self._agree is None else MAX_GROUP_PAUSE_S

    def _carry_out(self, run: GenerationRun, call: EngineCall) -> None:
        """Generate until all samples are finished, including those that arrive from other ranks."""
        with slot_attention(self._model), self._packed_weights(run.samples, call.params) as pack, run:
            self._rebalance(run, SampleAccess([run], run.samples), call)
            while self._lockstep(run.has_work) if self._lockstep is not None else run.has_work:
                self._take_newer_weights(run, pack)
                run.step()
                call.notifier.follow(run.ended)

    def _rebalance(self, run: SteppedRun, access: SampleAccess, call: EngineCall) -> None:
        """Generate while samples move between ranks, if they may."""
        if self._rebalancer is not None:
            hints, most = call.requests.length_hints, call.params.max_new_tokens
            self._rebalancer.run_to_end(run, access, hints, max_new_tokens=most, on_step=call.notifier.follow)

    def _take_newer_weights(self, run: GenerationRun, pack: Callable[[], None]) -> None:
        version = None if self._poll_weights is None else self._poll_weights()
        if version is not None:
            run.weights_updated(self._version)
            self._version = version
            pack()

    def _packed_weights(
        self, samples: Sequence[Sample], params: SamplingParams
    ) -> AbstractContextManager[Callable[[], None]]:
        """Return a context in which weights are packed if responses may be long enough for it."""
        return packed_linears(self._model, num_steps=self._num_packed_steps(samples, params))

    def _num_packed_steps(self, samples: Sequence[Sample], params: SamplingParams) -> int:
        """Return the steps for which weights are worth packing: most tokens of a response; 0 if they are not."""
        of_others = 0 if self._rebalancer is None else params.max_new_tokens
        return max((sample.max_new_tokens for sample in samples), default=of_others) if self._pack_weights else 0

    def _scheduler(
        self,
        waiting: Sequence[Prompt],
        samples: Sequence[Sample],
        executor: ModelRunner,
        decoding: Decoding,
        *,
        num_slots: int,
        num_kept: int,
    ) -> Scheduler:
        cache, most = executor.cache, self._max_prefill_tokens
        if not isinstance(cache, PagedCache):
            decoding.follower.share_cache(cache)
            return Scheduler(waiting, num_slots=num_slots, num_kept=num_kept, max_prefill_tokens=most)
        cache.forget_shapes()
        decoding.follower.share_cache(cache)
        if self._lockstep is not None:
            self._lockstep(True)  # all ranks run the dummy forward, too, unless one of them has failed
        lengths, may_grow = [sample.max_length for sample in samples], self._rebalancer is not None
        with slot_attention(self._model):
            tables = executor.lay_out_pages(lengths, num_slots=num_slots + num_kept, may_grow=may_grow)
        return PagedScheduler(
            waiting, samples=samples, tables=tables, num_slots=num_slots, num_kept=num_kept,
            num_ahead=decoding.max_ahead, max_prefill_tokens=most,
        )  # fmt: skip

    def _budget(self, call: EngineCall, ended: Callable[[], Sequence[Sample]]) -> Budget:
        """Return the budget of a call; ``ended`` returns its finished samples, to report them before it may stop."""
        asked, agree, clock = call.requests, self._agree, self._wall_clock
        tokens, seconds = asked.token_budget, asked.seconds_budget

        def may_stop() -> bool:
            call.notifier.follow(ended())
            return asked.may_stop is None or asked.may_stop()

        if agree is not None:
            return Budget(tokens, seconds, lambda: agree([clock()])[0], may_stop)  # ranks must stop after the same step
        if seconds is not None and self._is_tensor_parallel:
            raise GenerationError(
                "seconds_budget needs one clock for all ranks in tensor parallelism; pass "
                "GenerationEngine(agree=...), or bound the call by token_budget"
            )
        return Budget(tokens, seconds, clock, may_stop)

    def _conversations(
        self, environment: Environment | None, conversation: Conversation | None
    ) -> Conversations | None:
        check_environment(environment, conversation)
        if environment is None:
            return None
        group = tensor_parallel_group(self._model)
        if group is not None and self._agree is None:
            raise GenerationError(
                "ranks in tensor parallelism must take the same answers of an environment at the same step, and each "
                "would ask separately; pass GenerationEngine(agree=...), which gives all ranks the first one's answers"
            )
        return build_conversations(
            environment,
            conversation,
            self._rebalancer,
            vocabulary=vocabulary_of(self._model),
            clock=self._wall_clock,
            agree=self._agree,
            asks=group is None or group.index == 0,
            waits=self.waits,
            place=self._placed,
        )

    @property
    def _is_tensor_parallel(self) -> bool:
        return tensor_parallel_group(self._model) is not None

    def _check_agreement(self, peers: Peers | None) -> None:
        """Raise GenerationError if tensor-parallel ranks would make different decisions."""
        if self._is_tensor_parallel and (self._decoding.adapts or peers is not None):
            raise GenerationError(
                "ranks in tensor parallelism must decide alike how much to draft and which samples move, and each "
                "would use its own clock; pass GenerationEngine(agree=...), which gives all ranks one rank's numbers, "
                "or draft a fixed number of tokens: Speculation(num_draft_tokens=4)"
            )
