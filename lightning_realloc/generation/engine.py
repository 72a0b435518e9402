"""Prompts in, completions out, on the weights that a Hugging Face model holds right now.

This module checks what it is given and keeps what outlives a call; `run` carries one call out.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from numbers import Real
from typing import TYPE_CHECKING

import torch
from torch import nn

from lightning_realloc.errors import GenerationError
from lightning_realloc.generation.cache.kv_cache import SlotCache
from lightning_realloc.generation.cache.paged_cache import PagedCache
from lightning_realloc.generation.cache.prefix_index import SampleLengths, longest_of
from lightning_realloc.generation.core.model_config import length_bounds, vocabulary_of
from lightning_realloc.generation.core.plain_decoding import Decoding
from lightning_realloc.generation.core.sample import Completion, Sample
from lightning_realloc.generation.core.sampling import SamplingParams, check_counts
from lightning_realloc.generation.core.stopping import (
    StopRule,
    StopStringCheck,
    Tokenizer,
    check_tokenizer,
    stop_rule_of,
)
from lightning_realloc.generation.forward.attention import check_idle, check_loaded, check_supported, slot_attention
from lightning_realloc.generation.forward.cuda_graphs import StepGraphs
from lightning_realloc.generation.forward.packed_linear import packed_linears
from lightning_realloc.generation.forward.runner import ModelRunner
from lightning_realloc.generation.loop.environment import Conversation, Conversations, Environment
from lightning_realloc.generation.loop.requests import Requests, check_callables, next_version
from lightning_realloc.generation.loop.run import GenerationRun, GenerationStats
from lightning_realloc.generation.loop.sample_access import SampleAccess
from lightning_realloc.generation.loop.streaming import CompletionNotifier, PartialResults
from lightning_realloc.generation.schedule.budget import Budget
from lightning_realloc.generation.schedule.paged_scheduler import PagedScheduler
from lightning_realloc.generation.schedule.scheduler import Prompt, Scheduler
from lightning_realloc.limits import MAX_PREFILL_TOKENS
from lightning_realloc.setting_hints import ENGINE_HINTS, suggest_settings

if TYPE_CHECKING:  # loaded only where they are used
    from lightning_realloc.generation.rebalance.handover import MigrationStats
    from lightning_realloc.generation.rebalance.peers import Peers
    from lightning_realloc.generation.rebalance.protocol import Rebalancer, WaitingCalls
    from lightning_realloc.generation.speculative.config import Speculation
    from lightning_realloc.generation.speculative.drafter import Drafter

_log = logging.getLogger(__name__)


@suggest_settings(ENGINE_HINTS)
class GenerationEngine:
    """Continuous batching on a Hugging Face decoder, through transformers' attention registry.

    The model is used as it is: every forward reads its parameters anew, so all that a weight update has to do is to
    happen between two calls. Output is a function of weights, prompts, ``params.seed`` and sample ids; slots, batch
    composition and layout enter only through the rounding of matrix products of other shapes.

    Args:
        model: Nothing of it is copied or kept, but for packed weights during a call.
        tokenizer: Its end-of-sequence token ends responses, as the model's does; stop strings need it.
        max_slots: Samples that run at a time.
        max_length: Bounds prompt plus response, besides the model's own context.
        lockstep: For models whose forward is collective: called before every step with "this rank has work", it returns
            whether any rank has, and a rank without work then joins with a dummy token.
        speculation: Drafts tokens ahead and verifies several at once; None: one token at a time, or, with a
            ``drafter``, as many as pay.
        drafter: Takes the place of the one that ``speculation`` names.
        agree: For models in tensor parallelism: given this rank's measured seconds, it returns those that all ranks of
            the group go by, such as the first one's.
        pack_weights: Let long generations on CPU copy linear layers' weights into the order that their products are
            fastest with, and drop the copies at the end; False: it saves the memory of the copies.
        cuda_graphs: Capture steps that read no prompts and replay them, with one launch each; False: it saves the
            graphs' memory. Without effect on CPU, under ``lockstep`` or ``max_cache_bytes``, in tensor parallelism, and
            for models whose forwards cannot be captured, of which a warning tells.
        clock: Tells the seconds by which depths are planned and ``stats`` are counted; on a machine shared with others
            ``time.process_time`` says more about this process.
        max_prefill_tokens: Bounds what one step reads besides the tokens of running samples; longer prompts are read in
            several steps.
        max_cache_bytes: Bounds the bytes of keys and values, a draft model's among them: they are kept in pages, which
            sequences that begin alike share; samples for which there are none wait, or give theirs back and are read
            again later. None: every slot has room for the longest sequence. The tokens are the same.
        wall_clock: Tells seconds for budgets and deadlines.
        peers: Ranks that call `generate` at the same time for samples of their own, on the same weights. Samples then
            move between the ranks so that all finish together, and every rank returns those that it was asked for.
            Queued samples move; with ``Peers(moves="all")`` running ones move as well. None: samples stay.
    """

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
        agree: Callable[[Sequence[float]], Sequence[float]] | None = None,
        pack_weights: bool = True,
        cuda_graphs: bool = True,
        clock: Callable[[], float] = time.perf_counter,
        max_prefill_tokens: int = MAX_PREFILL_TOKENS,
        max_cache_bytes: int | None = None,
        wall_clock: Callable[[], float] = time.monotonic,
        peers: Peers | None = None,
    ) -> None:
        """Remember the model; nothing is allocated before the first `generate`.

        Raises:
            GenerationError: for a model that the engine cannot run; see :func:`check_supported`.
        """
        check_supported(model, max_length=1)
        check_loaded(model)
        check_counts(max_slots=max_slots, max_prefill_tokens=max_prefill_tokens)
        check_counts(optional=True, max_length=max_length)
        check_counts(Real, optional=True, max_cache_bytes=max_cache_bytes)
        check_tokenizer(tokenizer)
        _check_parts(speculation, drafter, peers, lockstep)
        self._model = model
        self._tokenizer = tokenizer
        self._max_slots = max_slots
        self._max_length = max_length
        self._max_prefill_tokens = max_prefill_tokens
        self._lockstep = lockstep
        self._agree = agree
        self._wall_clock = wall_clock
        self._version = 0
        self._check_stop_strings = StopStringCheck(tokenizer)
        self._cache = SlotCache() if max_cache_bytes is None else PagedCache(int(max_cache_bytes))
        self._graphs = None
        if cuda_graphs and lockstep is None and isinstance(self._cache, SlotCache):
            self._graphs = StepGraphs(model, self._cache)
        self._pack_weights = pack_weights
        self._decoding = Decoding()
        if speculation is not None or drafter is not None:
            self._decoding = self._speculator(speculation, drafter, cuda_graphs=cuda_graphs, clock=clock)
        self._stats = GenerationStats()
        self.partial_results: PartialResults | None = None
        """Where callers may hand on what is finished before a call is over; None: nobody waits for that."""
        self.waiting_calls: WaitingCalls | None = None
        """Work for times in which this rank has no samples and its peers still generate; None: it waits for them."""
        if agree is None:
            self._check_agreement(peers)
        self._rebalancer = _make_rebalancer(peers, agree, clock) if peers is not None and peers.others else None

    def _speculator(
        self,
        speculation: Speculation | None,
        drafter: Drafter | None,
        *,
        cuda_graphs: bool,
        clock: Callable[[], float],
    ) -> Decoding:
        """Return speculative decoding; imported here, since plain decoding needs none of it."""
        from lightning_realloc.generation.speculative.config import Speculation
        from lightning_realloc.generation.speculative.drafter import Drafter
        from lightning_realloc.generation.speculative.registry import build_drafter
        from lightning_realloc.generation.speculative.speculator import Speculator

        if speculation is None:
            proposes = drafter is not None and type(drafter).propose is not Drafter.propose
            speculation = Speculation(drafter="none", num_draft_tokens=None if proposes else 0)
        drafter = drafter or build_drafter(speculation, self._model)
        drafter.cuda_graphs = cuda_graphs and self._lockstep is None
        vocabulary = vocabulary_of(self._model)
        return Speculator(speculation, drafter, agree=self._agree, clock=clock, vocabulary=vocabulary)

    @property
    def stats(self) -> GenerationStats:
        """What the last call did."""
        return self._stats

    @property
    def migration_stats(self) -> MigrationStats:
        """Samples that moved from and to this rank in the last call, and their cost; zeros without peers."""
        if self._rebalancer is not None:
            return self._rebalancer.stats
        from lightning_realloc.generation.rebalance.handover import MigrationStats

        return MigrationStats()

    def weights_updated(self, version: int | None = None) -> None:
        """Say that the parameters changed, and what to call them: by default by the next number, from 0.

        Nothing computed from them outlives a call, so there is nothing to drop.
        """
        self._version = next_version(self._version, version)

    def release(self) -> None:
        """Give the storage of cache and CUDA graphs back; the next call allocates it again."""
        self._cache.release()
        if self._graphs is not None:
            self._graphs.release()

    @torch.no_grad()  # not inference_mode: its tensors break a later training forward under FSDP
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | None = None,
        *,
        sample_ids: Sequence[int] | None = None,
        length_hints: Sequence[int] | None = None,
        token_limits: Sequence[int] | None = None,
        environment: Environment | None = None,
        conversation: Conversation | None = None,
        token_budget: int | None = None,
        seconds_budget: float | None = None,
        resume: Sequence[Completion] = (),
        on_finished: Callable[[Completion], None] | None = None,
        may_stop: Callable[[], bool] | None = None,
    ) -> list[Completion]:
        """Return ``params.n`` completions per prompt, those of one prompt adjacent, in the order of the prompts.

        ``prompts`` holds token ids. ``sample_ids`` holds one distinct id per new completion (default: their order,
        behind the ids in ``resume``) and keys their randomness. ``length_hints`` holds an expected response length per
        prompt: long ones start first. ``token_limits`` holds a bound per prompt that may lower
        ``params.max_new_tokens``.

        ``environment`` is asked what follows whenever a turn ends by its stop rule; ``conversation`` bounds how often
        and how long. ``params.max_new_tokens`` bounds the model's tokens and the environment's together.

        A budget of the model's tokens, or of seconds, ends the call after the first step that spends it; completions
        are then "unfinished" where they are. Given back as ``resume``, with the same ``params``, they go on as if
        nothing had happened, beside the new prompts; their keys and values are computed by the weights of now. They
        are returned behind the others, and come behind the prompts in ``length_hints`` and ``token_limits``.

        ``on_finished`` is called once with each of the completions, between two steps: with those that end on this rank
        when they do, with all others at the end. A budget ends the call only where ``may_stop`` returns True, which is
        asked after ``on_finished``; under tensor parallelism it must tell all ranks the same.

        Raises:
            GenerationError: for what cannot be generated from, and for logits that are not finite.
        """
        requests = Requests(
            prompts=prompts, resume=resume, params=SamplingParams() if params is None else params,
            sample_ids=sample_ids, length_hints=length_hints, token_limits=token_limits,
            vocabulary=vocabulary_of(self._model), bounds=length_bounds(self._model, self._max_length),
        )  # fmt: skip

        def may_end() -> bool:
            notifier.follow(run.ended)
            return may_stop is None or may_stop()

        with nullcontext() if self._rebalancer is None else self._rebalancer.announced():
            check_idle(self._model)
            check_callables(on_finished=on_finished, may_stop=may_stop)
            samples = requests.samples()
            num_own = len(samples)
            notifier = CompletionNotifier(samples, on_finished, lambda sample: sample.completion(self._version))
            budget = self._budget(token_budget, seconds_budget, may_end)
            run, access = self._begin(requests, samples, budget, self._conversations(environment, conversation))
            self._carry_out(run, access, notifier, requests)
        del samples[num_own:]  # other ranks'
        _warn_of_failures(samples)
        notifier.tell(samples)
        return [sample.completion(self._version) for sample in samples]

    def _begin(
        self, requests: Requests, samples: list[Sample], budget: Budget, conversations: Conversations
    ) -> tuple[GenerationRun, SampleAccess]:
        """Return a run with nothing admitted yet, its cache as long as its samples need it, and access to these."""
        stop = self._stop_rule(requests.params)
        waiting = [prompt for prompt in requests.queue(samples) if not stop.already_ends(samples[prompt.samples[0]])]
        longest = max(map(longest_of, samples), default=1)
        check_supported(self._model, max_length=longest)
        num_own, num_slots = max(1, len(samples)), self._num_slots(samples)
        runner = ModelRunner(
            self._model, self._cache, num_slots=min(num_slots, num_own), longest=longest, graphs=self._graphs
        )
        scheduler = self._scheduler(waiting, samples, runner, num_slots)
        run = GenerationRun(
            runner, scheduler, samples, requests.params, stop, self._decoding, conversations, budget,
            num_slots=num_slots, may_pause=self._lockstep is None,
            longest_pause_s=math.inf if self._rebalancer is None else self._rebalancer.max_pause_s,
        )  # fmt: skip
        return run, SampleAccess(run, runner, scheduler, conversations, self._decoding.admitted)

    def _carry_out(
        self, run: GenerationRun, access: SampleAccess, notifier: CompletionNotifier, requests: Requests
    ) -> None:
        """Generate until all samples are finished, those that arrive from other ranks included."""
        try:
            with slot_attention(self._model), self._packed_weights(run.samples, requests.params), run:
                if self._rebalancer is not None:
                    self._rebalancer.run_to_end(
                        run, access, requests.length_hints, max_new_tokens=requests.params.max_new_tokens,
                        on_step=notifier.follow, waiting_calls=self.waiting_calls,
                    )  # fmt: skip
                while self._anybody_has_work(run.has_work):
                    run.step()
                    notifier.follow(run.ended)
        except BaseException:
            self._cache.release()  # it may hold values that are not finite
            raise
        self._stats = run.stats()

    def _packed_weights(self, samples: Sequence[Sample], params: SamplingParams) -> AbstractContextManager[None]:
        """Return the context within which weights are packed, where the responses to come are long enough for it."""
        of_others = 0 if self._rebalancer is None else params.max_new_tokens
        num_steps = max((sample.max_new_tokens for sample in samples), default=of_others) if self._pack_weights else 0
        return packed_linears(self._model, num_steps=num_steps)

    def _num_slots(self, samples: Sequence[Sample]) -> int:
        """Return how many of a call's samples, and of those that other ranks bring, run at a time."""
        return self._max_slots if self._rebalancer is not None else max(1, min(self._max_slots, len(samples)))

    def _scheduler(
        self, waiting: Sequence[Prompt], samples: Sequence[Sample], runner: ModelRunner, num_slots: int
    ) -> Scheduler:
        cache, most = self._cache, self._max_prefill_tokens
        if isinstance(cache, SlotCache):
            self._decoding.share_cache(cache)
            return Scheduler(waiting, num_slots=num_slots, max_prefill_tokens=most)
        cache.forget_shapes()
        if self._lockstep is not None:
            self._lockstep(True)  # this forward, too, is every rank's, unless one of them has failed
        with slot_attention(self._model):
            runner.forward([], [])  # one token: what layers bring is known before any long work
        self._decoding.share_cache(cache)
        tables = cache.lay_out(
            [longest_of(sample) for sample in samples], num_slots=num_slots, may_grow=self._rebalancer is not None
        )
        return PagedScheduler(
            waiting, lengths=SampleLengths(samples, cache.page_size), tables=tables, num_slots=num_slots,
            num_ahead=self._decoding.max_ahead, max_prefill_tokens=most,
        )  # fmt: skip

    def _anybody_has_work(self, has_work: bool) -> bool:
        return has_work if self._lockstep is None else self._lockstep(has_work)

    def _budget(self, tokens: int | None, seconds: float | None, may_stop: Callable[[], bool]) -> Budget:
        agree, clock = self._agree, self._wall_clock
        if agree is not None:
            return Budget(tokens, seconds, lambda: agree([clock()])[0], may_stop)  # ranks must stop after the same step
        if seconds is not None and self._is_tensor_parallel:
            raise GenerationError(
                "seconds_budget needs ranks in tensor parallelism to go by one clock; pass "
                "GenerationEngine(agree=...), or bound the call by token_budget"
            )
        return Budget(tokens, seconds, clock, may_stop)

    def _conversations(self, environment: Environment | None, conversation: Conversation | None) -> Conversations:
        if environment is not None and (self._agree is not None or self._is_tensor_parallel):
            raise GenerationError(
                "an environment cannot be asked under tensor parallelism: every rank would ask on its own, and go on "
                "by another answer at another time; generate in a layout with tp=1"
            )
        return Conversations(environment, conversation, vocabulary=vocabulary_of(self._model), clock=self._wall_clock)

    def _stop_rule(self, params: SamplingParams) -> StopRule:
        rule = stop_rule_of(self._model, params, self._tokenizer)
        self._check_stop_strings(params.stop_strings)
        return rule

    @property
    def _is_tensor_parallel(self) -> bool:
        return any(hasattr(module, "tp_group") for module in self._model.modules())

    def _check_agreement(self, peers: Peers | None) -> None:
        """Raise GenerationError where other ranks would decide otherwise about what they do together."""
        if self._is_tensor_parallel and (self._decoding.adapts or peers is not None):
            raise GenerationError(
                "ranks in tensor parallelism have to decide alike how much to draft, and which samples move, and each "
                "would go by its own clock; pass GenerationEngine(agree=...), which gives all ranks one rank's "
                "numbers, or draft a fixed number of tokens: Speculation(num_draft_tokens=4)"
            )


def _warn_of_failures(samples: Sequence[Sample]) -> None:
    errors = [sample.error for sample in samples if sample.error is not None]
    if errors:
        _log.warning(
            "%d of %d responses were ended by a failure of their environment; the first one: %s",
            len(errors), len(samples), errors[0],
        )  # fmt: skip


def _make_rebalancer(
    peers: Peers, agree: Callable[[Sequence[float]], Sequence[float]] | None, clock: Callable[[], float]
) -> Rebalancer:
    """Return the object that moves samples; its package is loaded only here."""
    from lightning_realloc.generation.rebalance.protocol import Rebalancer

    return Rebalancer(peers, agree=agree, clock=clock)


def _check_parts(speculation: object, drafter: object, peers: object, lockstep: object) -> None:
    """Raise GenerationError where one is given and is something else, or two exclude each other.

    YAML takes a mapping for a dataclass, Python does not.
    """
    if speculation is not None or drafter is not None:
        _check_drafting(speculation, drafter)
    if peers is not None:
        from lightning_realloc.generation.rebalance.peers import Peers

        if not isinstance(peers, Peers):
            raise _of_another_kind("peers", peers, "Peers")
    if peers is not None and lockstep is not None:
        raise GenerationError(
            "ranks whose forwards wait for each other make every step together, so moving samples between them "
            "gains nothing; leave peers or lockstep out"
        )


def _check_drafting(speculation: object, drafter: object) -> None:
    """Raise GenerationError where one is given and is something else."""
    from lightning_realloc.generation.speculative.config import Speculation
    from lightning_realloc.generation.speculative.drafter import Drafter

    if speculation is not None and not isinstance(speculation, Speculation):
        raise _of_another_kind("speculation", speculation, "Speculation")
    if drafter is not None and not isinstance(drafter, Drafter):
        raise GenerationError(
            f"drafter={drafter!r} must be a Drafter; name one by speculation=Speculation(drafter=...) instead"
        )


def _of_another_kind(name: str, given: object, kind: str) -> GenerationError:
    return GenerationError(f"{name}={given!r} is a {type(given).__name__}; write {kind}(...)")
