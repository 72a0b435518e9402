"""Running the calls of a dataflow on this rank: who works on which samples, and what becomes of the results.

Every rank walks through the same calls in the same order and takes part in those whose ranks include it; the others it
passes by, so calls on disjoint ranks run at the same time. Nothing here waits for all ranks: a rank waits for what it
needs, and is told of failures elsewhere while it does.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_realloc.batch.samples import Column, Samples
from lightning_realloc.batch.training import MicroBatch
from lightning_realloc.dataflow.dataflow import ModelFunctionCall
from lightning_realloc.layout.dims import Layout
from lightning_realloc.runtime.messages.mailbox import Mailbox
from lightning_realloc.strategies.calls.early_work import EarlyCalls
from lightning_realloc.strategies.calls.engines import EnginePool, refuse_long_prompts
from lightning_realloc.strategies.calls.generate_call import GenerateCalls
from lightning_realloc.strategies.calls.idle import IdleClock, merge_idle_shares
from lightning_realloc.strategies.calls.infer_call import InferCalls
from lightning_realloc.strategies.calls.lockstep import PeerFailure
from lightning_realloc.strategies.calls.metrics import count_tokens, facts_of, with_rates
from lightning_realloc.strategies.calls.train_call import Trainee
from lightning_realloc.strategies.calls.training_metrics import TrainingMetrics
from lightning_realloc.strategies.exchange.call_placement import CallPlacement
from lightning_realloc.strategies.exchange.iteration_data import IterationData
from lightning_realloc.strategies.exchange.routing import Routes
from lightning_realloc.strategies.lightning.signals import StopRequest
from lightning_realloc.strategies.pool.model_pool import ModelPool
from lightning_realloc.strategies.pool.replica import Replica
from lightning_realloc.tuning.timeline.simulator import Overlap

PhaseContext = Callable[[str], Any]


@dataclass(frozen=True, slots=True)
class IterationResult:
    """What every rank knows after an iteration."""

    samples: Samples
    """All samples, with what the calls made of each; of sequences the lengths."""
    metrics: Mapping[str, Tensor]
    """What calls measured, the same on all ranks. Of training calls that not all ranks take part in, perhaps what they
    measured in the iteration before: nobody waits for them."""
    carried: Samples | None = None
    """What generating calls left for the next iteration, from all ranks; None: nothing."""
    shown: Samples | None = None
    """The first samples by id, with their responses; None where none were asked for."""


class CallRunner:
    """Runs calls of one algorithm.

    Args:
        module: The algorithm; its methods do the work.
        pool: Its models.
        mailbox: Between the ranks.
        phase: Context manager around every model's call: tells callbacks, yields the replica to work on.
        trainee: Steps the optimizers.
        layout_of: The layout in which a call's model will be.
        overlap: What may run at the same time.
        max_staleness: How many iterations of training a response's policy may lack of the one that learns from it.
        generation_parts: In how many portions samples go to calls on other ranks while they are generated.
        frees_copies: Whether copies of models are gone between their calls, to save memory.
        stop: Whether the run should end; travels with the ranks' messages.
        device: Where tensors are worked on.
        rank: This process.
        world_size: All processes.
    """

    def __init__(
        self,
        module: Any,
        pool: ModelPool,
        mailbox: Mailbox,
        phase: PhaseContext,
        trainee: Trainee,
        *,
        layout_of: Callable[[str], Layout],
        overlap: Overlap,
        max_staleness: int,
        generation_parts: int = 1,
        frees_copies: bool = False,
        stop: StopRequest,
        device: torch.device,
        rank: int,
        world_size: int,
    ) -> None:
        self._module = module
        self._pool = pool
        self._mailbox = mailbox
        self._enter_phase = phase
        self._trainee = trainee
        self._layout_of = layout_of
        self._overlap = overlap
        self._max_staleness = max_staleness
        self._frees_copies = frees_copies
        self._num_parts = generation_parts
        self._stop = stop
        self._ahead: tuple[IterationData, ...] = ()
        """Batches with responses that were not trained on yet."""
        self._version = 0
        """Iterations that were trained in."""
        self._device = device
        self._rank = rank
        self._world_size = world_size
        self._idle = IdleClock(mailbox, pool)
        self._engines = EnginePool(module, pool, mailbox, device=device, rank=rank)
        self._inference = InferCalls(module, pool, device=device, rank=rank)
        # With responses of the policy before, weights change between a generating call and those that read from it.
        self._tails = EarlyCalls(pool, self._inference) if not max_staleness else None
        self._generating = GenerateCalls(module, pool, self._engines, self._tails, self._idle, device=device)
        self._run = self._num_tokens = 0
        self.is_running = False
        """Whether calls are under way."""
        self._training_metrics = TrainingMetrics(
            mailbox, rank=rank, world_size=world_size, may_be_late=overlap == "iterations"
        )
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.counts: defaultdict[str, int] = defaultdict(int)
        self._facts_of_next: dict[str, float] = {}
        """What calls measured that were run for the next iteration before it."""

    def run_iteration(
        self, batch: Samples, calls: Sequence[ModelFunctionCall], *, iteration: int, is_last: bool, num_shown: int = 0
    ) -> tuple[IterationResult, ...]:
        """Run an iteration's calls and return what every rank knows of each batch that was trained on.

        That is this batch, or, where generation runs ahead, the one before: none the first time, both the last time.

        Args:
            batch: What the loader supplied, the same on every rank.
            calls: In the dataflow's order.
            iteration: Iterations done before.
            num_shown: Of how many samples all ranks are told the responses.
            is_last: Whether training may end or pause here: then all metrics are waited for, and nothing is left over.

        Raises:
            ReallocError: on every rank, when a rank failed.
        """
        with self._failing_together():
            self._idle.begin()
            self._version = iteration - len(self._ahead)
            data = self._begin(batch, calls, iteration, generates_ahead=self._max_staleness > 0)
            data.num_shown = num_shown
            self._work_on(data, data.routes.at_once())
            due = (*self._ahead, data) if is_last or not self._max_staleness else self._ahead
            self._ahead = () if is_last or not self._max_staleness else (data,)
            results = tuple(self._conclude(each, is_last=is_last) for each in due)
            self._mailbox.release(self._run - 2)
            if self._overlap != "iterations":
                self._mailbox.barrier()
            self._idle.end()
        return results

    def run_calls(self, batch: Samples, calls: Sequence[ModelFunctionCall], *, are_of_next: bool = False) -> Samples:
        """Run calls without training, and return all samples with everything that they made. Collective.

        ``are_of_next``: whether what they measured belongs to the next iteration.
        """
        with self._failing_together():
            data = self._begin(batch, calls, iteration=0)
            self._work_on(data, data.routes.calls)
            facts = self._receive_notes(data)
            if are_of_next:
                self._facts_of_next = facts
            self._engines.hear()
            self._mailbox.release(self._run)
        return data.gather(self._device)

    def can_go_on(self) -> bool:
        """Return whether calls can still be run: no rank failed, and no later runner was made. Collective."""
        return self._pool.meshes.is_host_group(self._mailbox.group) and not self._mailbox.has_failed

    @property
    def seconds_idle(self) -> float:
        """Seconds that this rank has waited for data, weights and other ranks."""
        return self._idle.seconds

    @property
    def is_ahead(self) -> bool:
        """Whether there are responses that were not trained on yet."""
        return bool(self._ahead)

    def plan_changed(self) -> None:
        """Forget the models of the plan before. The pool serves another plan from now on."""
        self._engines.forget()
        self._trainee.forget_skips()

    def finish(self) -> None:
        """Take in what is still on its way. Collective over all ranks, after the last iteration.

        A batch that waits to be trained on, where a run ended before its epoch, is left out.
        """
        for data in self._ahead:
            data.drain(data.routes.at_once())
        self._ahead = ()
        self._training_metrics.finish()
        self._engines.hear()
        self._mailbox.release(self._run)

    # ---- one walk through the calls
    def _begin(
        self, batch: Samples, calls: Sequence[ModelFunctionCall], iteration: int, *, generates_ahead: bool = False
    ) -> IterationData:
        self._run += 1
        self._engines.hear(before=self._run - 1)  # where no call generated since, or nobody would let go of it
        placements = {call.name: self._placement(call, iteration) for call in calls if call.role is not None}
        routes = Routes(calls, placements, self._world_size, self._num_parts, self._module.group_size, generates_ahead)
        data = IterationData(batch, routes, self._mailbox, rank=self._rank, run=self._run, version=self._version)
        data.facts |= self._idle.facts(self._rank)
        if all(call.kind == "train" for call in calls):
            self._send_notes(data)  # there is nothing to wait for
        return data

    def _send_notes(self, data: IterationData) -> None:
        data.facts |= self._stop.as_metrics()
        data.send_notes()

    def _receive_notes(self, data: IterationData) -> dict[str, float]:
        facts = data.receive_notes()
        self._stop.take_from(facts)
        return facts

    def _work_on(self, data: IterationData, calls: Sequence[ModelFunctionCall]) -> None:
        """Run some calls of a batch."""
        last = max((index for index, call in enumerate(data.routes.calls) if call.kind != "train"), default=-1)
        alone = self._pool.alone(frees_copies=self._frees_copies)
        for group in data.routes.fusion.groups(calls, alone=alone):
            if group[0].name in data.routes.fusion.sources:
                seconds = self._infer_together(group, data)
            else:
                seconds = self._work_alone(group[0], data)
            for call in group:
                self._note(data, call, seconds.get(call.name))
            if any(data.index(call) == last for call in group):
                self._send_notes(data)
            if self._overlap == "none":
                self._idle.measure(self._mailbox.barrier)

    def _work_alone(self, call: ModelFunctionCall, data: IterationData) -> dict[str, float]:
        """Run one call, and return its seconds where this rank takes part in it."""
        begin, waited = time.perf_counter(), self._idle.seconds
        took_part = self._KINDS[call.kind](self, call, data)
        spent = time.perf_counter() - begin - (self._idle.seconds - waited) + data.early_seconds(call)
        return {call.name: spent} if took_part else {}

    def _note(self, data: IterationData, call: ModelFunctionCall, spent: float | None) -> None:
        """Keep what a call took; None without part in it."""
        moved = self._pool.take_report(call.name)
        data.facts |= {} if moved is None else facts_of(call.name, moved)
        if spent is None:
            return
        self.seconds[call.name] += spent
        self.counts[call.name] += 1
        if call.kind == "train":
            self._training_metrics.note(data, call, {f"seconds/{call.name}": spent})
        else:
            data.facts[f"seconds/{call.name}"] = spent

    def _conclude(self, data: IterationData, *, is_last: bool) -> IterationResult:
        """Run what is left to do of a batch, training included, and gather what every rank is to know."""
        self._work_on(data, data.routes.later())
        facts = self._receive_notes(data)
        facts, self._facts_of_next = self._facts_of_next | facts, {}
        known = data.known()
        metrics = with_rates(merge_idle_shares(facts), num_tokens=self._num_tokens)
        if self._max_staleness:
            metrics["staleness"] = float(self._version - data.version)
        metrics |= self._training_metrics.exchange(data, wait=is_last)
        self._num_tokens = count_tokens(known)
        self._version += 1
        told = {name: torch.tensor(value) for name, value in metrics.items()}
        return IterationResult(known, told, data.carried, data.shown())

    def _placement(self, call: ModelFunctionCall, iteration: int) -> CallPlacement:
        options = self._module.train_options_of(str(call.role))
        return CallPlacement(
            layout=self._layout_of(call.name),
            micro_batch_tokens=self._pool.plan.call(call.name).micro_batch_tokens or options.micro_batch_tokens,
            train_options=options,
            order_seeds=self._trainee.order_seeds(str(call.role), iteration),
        )

    @contextmanager
    def _failing_together(self) -> Iterator[None]:
        """Let every rank raise what one rank raises."""
        self.is_running = True
        try:
            yield
        except PeerFailure:
            self._mailbox.fail(None)
        except Exception as error:
            if self._mailbox.has_failed:
                raise
            self._mailbox.fail(error)
        finally:
            self.is_running = False

    @contextmanager
    def _phase(self, call: str) -> Iterator[Replica]:
        with ExitStack() as stack:
            yield self._idle.measure(lambda: stack.enter_context(self._enter_phase(call)))

    # ---- generate
    def _generate(self, call: ModelFunctionCall, data: IterationData) -> bool:
        table = data.table(call)
        refuse_long_prompts(table.known, self._pool.home(str(call.role)))
        made = None
        with self._phase(call.name) as replica:
            takes_part = self._rank in replica.layout
            if takes_part:
                prompts = data.inputs(call)
                prompts = table.known.select([]) if prompts is None else prompts
                made = self._generating.share(call, replica, prompts, data)
        data.publish_samples(call, made)
        return takes_part

    # ---- infer
    def _infer(self, call: ModelFunctionCall, data: IterationData) -> bool:
        made = None
        with self._phase(call.name) as replica:
            takes_part = self._rank in replica.layout
            if takes_part:
                index = replica.layout.data_parallel_index(self._rank)
                micro_batches = data.routes.micro_batches(call, data.table(call))[index]
                made = self._infer_share(call, replica, data, micro_batches)
        data.publish_columns(call, made)
        return takes_part

    def _infer_share(
        self, call: ModelFunctionCall, replica: Replica, data: IterationData, micro_batches: Sequence[MicroBatch]
    ) -> Samples | None:
        """Return what this rank makes of its samples, what it made early included."""
        early, table = data.early(call), data.table(call)
        rest = micro_batches[len(early.parts) :]
        if not rest:
            return early.made
        begin, chosen = time.perf_counter(), data.chosen(call)
        made = self._inference.share(call, replica, chosen, rest)
        if self._tails is not None and call.name in data.routes.fusion.tails:
            num_tokens = sum(table.lengths[position] for micro in rest for position in micro.positions)
            self._tails.pace.take(call.name, num_tokens=num_tokens, seconds=time.perf_counter() - begin)
        return made if not early.parts else Samples.concatenate([*early.parts, *([] if made is None else [made])])

    def _infer_together(self, calls: Sequence[ModelFunctionCall], data: IterationData) -> dict[str, float]:
        """Run fused calls of one source, and return the seconds of those in which this rank takes part."""
        with ExitStack() as stack:
            replicas = {call.name: stack.enter_context(self._phase(call.name)) for call in calls}
            mine = [call for call in calls if self._rank in replicas[call.name].layout]
            work = self._inference.units(mine, replicas, data) if mine else {}
        for call in calls:
            data.publish_columns(call, work[call.name].made if call.name in work else None)
        return {name: done.seconds for name, done in work.items()}

    # ---- compute
    def _compute(self, call: ModelFunctionCall, data: IterationData) -> bool:
        # Who has no part in it does not wait to hear what was generated.
        rows = data.inputs(call) if self._rank in data.routes.computing_ranks(call) else None
        if rows is None:
            return False
        columns: Mapping[str, Column] = getattr(self._module, call.method)(rows)
        data.publish_columns(call, Samples(rows.ids, columns).to("cpu"))
        return True

    # ---- train
    def _train(self, call: ModelFunctionCall, data: IterationData) -> bool:
        with self._phase(call.name) as replica:
            takes_part = self._rank in replica.layout
            if takes_part:
                table = data.table(call)
                steps = data.routes.train_steps(call, table)
                measured = self._trainee.train(
                    getattr(self._module, call.method), replica, data.chosen(call), steps, table
                )
                self._training_metrics.note(data, call, measured)
            self._pool.weights_trained(str(call.role))
            self._pool.update_averages(str(call.role))
        return takes_part

    _KINDS: ClassVar = {"generate": _generate, "infer": _infer, "compute": _compute, "train": _train}
