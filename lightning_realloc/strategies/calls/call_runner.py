"""Run the calls of a dataflow on this rank, iteration by iteration: inputs, the call, its results.

Every rank goes through the same calls in order, and takes part in those whose layout includes it. So calls on disjoint
ranks run at the same time. A rank waits for the data that it needs, not for all ranks, and learns of failures then.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Protocol

from torch import Tensor

from lightning_realloc.batch.samples import Samples, samples_from_state
from lightning_realloc.dataflow.dataflow import ModelFunctionCall
from lightning_realloc.errors import ReallocError
from lightning_realloc.layout.dims import Layout
from lightning_realloc.runtime.measure.usage import PeakMemory
from lightning_realloc.runtime.messages.flight_record import ActivityKind, FlightRecord
from lightning_realloc.strategies.calls.context import CallContext
from lightning_realloc.strategies.calls.engine_pool import EnginePool
from lightning_realloc.strategies.calls.full_device import naming_full_device
from lightning_realloc.strategies.calls.generate_call import GenerateCalls, refuse_long_prompts
from lightning_realloc.strategies.calls.infer_call import InferCalls
from lightning_realloc.strategies.calls.lockstep import PeerFailure
from lightning_realloc.strategies.calls.metrics import RunMetrics, as_tensors, mean_age
from lightning_realloc.strategies.calls.overlap import OverlapOptions
from lightning_realloc.strategies.calls.train_call import TrainCalls
from lightning_realloc.strategies.calls.weight_updates import VersionLog
from lightning_realloc.strategies.exchange.iteration_data import IterationData
from lightning_realloc.strategies.exchange.iteration_report import IterationReport, IterationResult
from lightning_realloc.strategies.exchange.routing import CallPlacement, Routes
from lightning_realloc.strategies.exchange.waiting_batches import Results, WaitingBatches
from lightning_realloc.strategies.lightning.optimizer_hooks import LightningOptimizers
from lightning_realloc.strategies.lightning.signals import StopRequest
from lightning_realloc.strategies.pool.replica import Replica


class PlacedModels(Protocol):
    """The models as callbacks and the plan place them for each call; `PlacedRoles` documents the members."""

    @property
    def frees_copies(self) -> bool: ...
    def phase(self, call: str) -> AbstractContextManager[Replica]: ...
    def layout_of(self, call: str) -> Layout: ...


class CallRunner:
    """Runs the calls of one algorithm.

    Args:
        stop: Whether the run should end; travels with the ranks' reports.
    """

    def __init__(
        self, context: CallContext, placed: PlacedModels, hooks: LightningOptimizers, options: OverlapOptions,
        stop: StopRequest,
    ) -> None:  # fmt: skip
        self._context, self._mailbox, self._pool = context, context.mailbox, context.pool
        self._placed, self._options, self._stop = placed, options, stop
        self._metrics = RunMetrics(context, may_be_late=options.overlap == "iterations")
        self.engines = EnginePool(context)
        """Engines that generate on this rank."""
        self._infer, self._train = InferCalls(context, self.engines), TrainCalls(context, hooks, self.engines)
        generate = GenerateCalls(context, self.engines, self._metrics.idle)
        self._run_kind: Mapping[str, Callable[[ModelFunctionCall, Replica, IterationData], Samples | None]] = {
            "generate": generate.run,
            "infer": self._infer.run,
            "train": self._train.run,
        }
        """Kind of a call -> what runs it on this rank's samples, and returns the results; None without any."""
        self._ahead: tuple[IterationData, ...] = ()
        """Batches with responses that wait to be trained on, at most ``max_staleness``."""
        self._left_out: tuple[IterationData, ...] = ()
        """The same, in a run that ended before it trained on them."""
        self._restored = WaitingBatches()
        """States of such batches in the checkpoint that the run continues from."""
        self._version = 0
        """Iterations of training so far."""
        self._is_off_policy = options.max_staleness > 0
        """Whether batches may come from older weights; also in a run that continues with such batches."""
        self._run = 0
        """Number of the latest pass over calls, the same on all ranks."""
        self._trained_runs: tuple[int, ...] = (0, 0, 0)
        """Numbers of the passes of the last batches that were trained on."""
        self.is_running = False
        """Whether calls are running."""
        self._allow_streams()

    @property
    def seconds(self) -> Mapping[str, float]:
        """Call -> its seconds on this rank so far."""
        return self._metrics.seconds

    @property
    def counts(self) -> Mapping[str, int]:
        """Call -> how often this rank took part in it."""
        return self._metrics.counts

    @property
    def seconds_idle(self) -> float:
        """Seconds that this rank has waited for data, weights and other ranks."""
        return self._metrics.idle.seconds

    @property
    def record(self) -> FlightRecord:
        """Latest activities of this rank."""
        return self._mailbox.record

    @property
    def peak_memory(self) -> PeakMemory:
        """Peak memory of this rank."""
        return self._context.peak_memory

    @property
    def version_log(self) -> VersionLog:
        """Versions of the weights that this rank generated each batch with."""
        return self._context.version_log

    @property
    def is_ahead(self) -> bool:
        """Whether responses wait to be trained on."""
        return bool(self._ahead)

    def run_iteration(
        self, batch: Samples, calls: Sequence[ModelFunctionCall], *, iteration: int, is_last: bool, num_shown: int = 0
    ) -> tuple[IterationResult, ...]:
        """Run an iteration's calls, and return a result for each batch that was trained on.

        That is this batch. If generation runs k steps ahead, it is the batch of k iterations before: none the first k
        times, all that wait the last time.

        Args:
            batch: The loader's batch, the same on every rank.
            calls: Calls in the dataflow's order.
            iteration: Iterations done before.
            is_last: Whether training may end or pause here: then no batch and no metric waits for the next iteration.
            num_shown: Number of samples, the first by id, whose responses every rank receives.

        Raises:
            ReallocError: on every rank, when a rank failed.
        """
        with self._failing_together():
            self._metrics.idle.begin()
            restored = self._restored
            self._is_off_policy = self._is_off_policy or bool(restored)
            for steps_before, state, made in zip(
                range(len(restored), 0, -1), restored.batches, restored.results, strict=True
            ):
                self._ahead = (*self._ahead, self._restore(state, made, iteration - steps_before, num_shown))
            self._left_out, self._restored = (), WaitingBatches()
            self._version = self._pool.streams.version = iteration - len(self._ahead)
            most_ahead = self._options.max_staleness
            data = self._begin(batch, calls, iteration, num_shown, generates_ahead=most_ahead > 0)
            self._run_calls(data.routes.calls_at_once(), data)
            waiting = (*self._ahead, data)
            num_due = len(waiting) if is_last else max(0, len(waiting) - most_ahead)
            self._ahead = waiting[num_due:]
            results = tuple(self._conclude(each, is_last=is_last) for each in waiting[:num_due])
            # Ranks outside a training call receive its metrics one batch later.
            self._trained_runs = (*self._trained_runs, *(each.run for each in waiting[:num_due]))[-3:]
            self._mailbox.release(self._trained_runs[0])
            if self._options.overlap != "iterations":
                self._mailbox.barrier()
            self._metrics.idle.end()
        return results

    def run_calls(self, batch: Samples, calls: Sequence[ModelFunctionCall], *, are_of_next: bool = False) -> Samples:
        """Run calls without training, and return all samples with all results, on every rank. Collective.

        ``are_of_next``: whether to log their metrics with the next iteration, in place of those kept before.
        """
        with self._failing_together():
            data = self._begin(batch, calls, iteration=None)
            self._run_calls(data.routes.calls, data)
            report = self._receive_report(data)
            if are_of_next:
                self._metrics.keep_for_next(report.metrics)
            self.engines.receive_history()
            self._mailbox.release(self._run)
        return data.gather()

    @contextmanager
    def collective(self, name: str, *, kind: ActivityKind = "other") -> Iterator[None]:
        """Record a collective operation between iterations, and raise RankLost with the rank if a connection breaks."""
        with self._mailbox.record.during(name, kind=kind):
            try:
                yield
            except RuntimeError as error:
                named = self._mailbox.explained(error)
                if named is error:
                    raise
                raise named from error

    def can_go_on(self) -> bool:
        """Return whether calls can still be run: no rank failed, and no later runner was made. Collective."""
        return self._pool.meshes.is_host_group(self._mailbox.group) and not self._mailbox.has_failed

    def plan_changed(self) -> None:
        """Forget the models of the plan before: the pool serves another plan from now on."""
        self.engines.forget()
        self._train.forget_layouts()
        self._infer.forget_layouts()
        self._allow_streams()

    def finish(self) -> Mapping[str, Tensor]:
        """Receive all messages, and return metrics that no iteration had. Collective, after the last iteration.

        Batches that wait to be trained on, in a run that ended before its epoch, are left to a resumed run.
        """
        self._pool.streams.close()
        for data in self._ahead:
            data.drain(data.routes.calls_at_once())
        self._left_out, self._ahead = self._ahead, ()
        late = self._metrics.drain()
        self.engines.receive_history()
        self._mailbox.release(self._run)
        return late

    def close(self) -> None:
        """Free kept caches, and end processes that generate for this rank; a later call starts them again."""
        self.engines.close()

    # ---- batches that wait to be trained on, in checkpoints
    def waiting(self) -> WaitingBatches:
        """Return the batches that wait to be trained on, with this rank's results."""
        if waiting := self._ahead or self._left_out:
            return WaitingBatches([data.state() for data in waiting], [data.results_at_once() for data in waiting])
        return self._restored

    def restore(self, waiting: WaitingBatches | None) -> None:
        """Continue with the batches that waited when a checkpoint was saved; None: there are none."""
        self._metrics.forget_late()
        self._left_out, self._restored = (), waiting or WaitingBatches()

    def _restore(self, state: Mapping[str, Any], made: Results, iteration: int, num_shown: int) -> IterationData:
        """Return the data of a batch that waited in a checkpoint, as after its generating calls."""
        calls = [call for call in self._pool.dataflow.iteration_calls if call.name in state["calls"]]
        self._version = state["version"]
        batch = samples_from_state(state["batch"])
        data = self._begin(batch, calls, iteration, num_shown, generates_ahead=True)
        data.restore(made)
        last = [call for call in calls if call.kind != "train"][-1]
        if last in data.routes.calls_at_once():
            self._send_report(data)
        return data

    # ---- one pass over the calls
    def _begin(
        self, batch: Samples, calls: Sequence[ModelFunctionCall], iteration: int | None, num_shown: int = 0, *,
        generates_ahead: bool = False,
    ) -> IterationData:  # fmt: skip
        """Return the data of a new pass over the calls."""
        self._run += 1
        self.engines.receive_history(before=self._run - 1)  # or its senders could not free it while no call generates
        routes = Routes(
            calls,
            {call.name: self._placement(call, iteration or 0) for call in calls if call.role is not None},
            1 + len(self._mailbox.others),
            num_chunks=self._options.generation_chunks,
            group_size=self._context.algorithm.group_size,
            generates_ahead=generates_ahead,
        )
        rank, version = self._context.rank, self._version
        data = IterationData(
            batch,
            routes,
            self._mailbox,
            rank=rank,
            run=self._run,
            version=version,
            num_shown=num_shown,
            iteration=iteration,
        )
        self._metrics.idle.record(data.report)
        data.report.maxima["peak_memory_GiB"] = self._context.peak_memory.of_run() / 2**30
        if all(call.kind == "train" for call in calls):
            self._send_report(data)  # there is nothing to wait for
        return data

    def _placement(self, call: ModelFunctionCall, iteration: int) -> CallPlacement:
        return CallPlacement(
            layout=self._placed.layout_of(call.name),
            micro_batch_tokens=self._context.micro_batch_tokens(call),
            train_options=self._context.algorithm.train_options_of(str(call.role)),
            order_seeds=self._train.order_seeds(str(call.role), iteration),
        )

    def _run_calls(self, calls: Sequence[ModelFunctionCall], data: IterationData) -> None:
        """Run some calls of a batch, and send this rank's report after the last one before training."""
        before_training = [call for call in data.routes.calls if call.kind != "train"]
        alone = self._pool.alone(frees_copies=self._placed.frees_copies)
        for group in data.routes.fusion.groups(calls, alone=alone):
            is_fused = group[0].name in data.routes.fusion.sources
            with self._mailbox.record.during(" and ".join(call.name for call in group), kind="call"):
                seconds = self._run_fused(group, data) if is_fused else self._run_timed(group[0], data)
            for call in group:
                self._metrics.record_call(data, call, seconds.get(call.name))
            if before_training and before_training[-1] in group:
                self._send_report(data)
            if self._options.overlap == "none":
                self._metrics.idle.measure(self._mailbox.barrier)

    def _run_timed(self, call: ModelFunctionCall, data: IterationData) -> dict[str, float]:
        """Run one call, and return its seconds, without waiting, if this rank takes part in it."""
        begin, waited = time.perf_counter(), self._metrics.idle.seconds
        takes_part = self._compute(call, data) if call.kind == "compute" else self._run_with_model(call, data)
        seconds = time.perf_counter() - begin - (self._metrics.idle.seconds - waited)
        return {call.name: seconds} if takes_part else {}

    def _run_with_model(self, call: ModelFunctionCall, data: IterationData) -> bool:
        """Run a call on this rank's samples, and record its results; return whether this rank takes part."""
        role = str(call.role)
        if call.kind == "generate":
            refuse_long_prompts(data.table(call).known, self._pool.home(role))
        with self._phase(call) as replica:
            takes_part = replica.is_inside
            made = self._run_kind[call.kind](call, replica, data) if takes_part else None
            if call.kind == "train":
                self._pool.weights_trained(role)
                self._pool.update_averages(role)
                self._metrics.idle.measure(lambda: self._pool.streams.push(role))
        data.record(call, made)
        return takes_part

    def _run_fused(self, calls: Sequence[ModelFunctionCall], data: IterationData) -> dict[str, float]:
        """Run fused calls of one source together, and return the seconds of those in which this rank takes part."""
        with ExitStack() as stack:
            replicas = {call.name: stack.enter_context(self._phase(call)) for call in calls}
            mine = [call for call in calls if replicas[call.name].is_inside]
            results = self._infer.run_fused(mine, replicas, data) if mine else {}
        for call in calls:
            data.record(call, results[call.name].samples if call.name in results else None)
        return {name: made.seconds for name, made in results.items()}

    def _compute(self, call: ModelFunctionCall, data: IterationData) -> bool:
        """Run a computation on this rank's samples, and record its results; return whether this rank takes part."""
        # A rank without part in it does not wait for samples to be generated.
        rows = data.inputs(call) if self._context.rank in data.routes.computing_ranks(call) else None
        if rows is None:
            return False
        data.record(call, Samples(rows.ids, self._context.method_of(call)(rows)).to("cpu"))
        return True

    def _allow_streams(self) -> None:
        """Let weights travel in the background to calls that generate more than one step ahead."""
        plan = self._pool.plan if self._options.pushes_weights else None
        self._pool.streams.allow(self._pool.dataflow, plan, frees_copies=self._placed.frees_copies)

    @contextmanager
    def _phase(self, call: ModelFunctionCall) -> Iterator[Replica]:
        with naming_full_device(call, self._placed.layout_of(call.name), self.engines), ExitStack() as stack:
            with self._mailbox.record.during(  # the move itself is recorded inside
                f"moving weights for {call.name}", kind="wait"
            ):
                replica = self._metrics.idle.measure(lambda: stack.enter_context(self._placed.phase(call.name)))
            yield replica

    # ---- the end of an iteration
    def _conclude(self, data: IterationData, *, is_last: bool) -> IterationResult:
        """Run the remaining calls of a batch, training included, and return its result."""
        self._run_calls(data.routes.calls_later(), data)
        report, known = self._receive_report(data), data.known()
        metrics, overdue = self._metrics.summarize(data, report.metrics, known, wait=is_last)
        if self._is_off_policy:
            metrics["staleness"] = mean_age(known, otherwise=self._version - data.version)
        self._version += 1
        self._pool.streams.version = self._version
        return IterationResult(known, as_tensors(metrics), as_tensors(overdue), report.carried, data.shown(report))

    def _send_report(self, data: IterationData) -> None:
        data.report.maxima |= self._stop.as_metrics()
        data.send_report()

    def _receive_report(self, data: IterationData) -> IterationReport:
        report = data.receive_report()
        self._stop.pop_from(report.maxima)
        return report

    @contextmanager
    def _failing_together(self) -> Iterator[None]:
        """Raise on every rank the error that one rank raises."""
        self.is_running = True
        try:
            yield
        except PeerFailure:
            self._mailbox.fail(None)
        except SystemExit as error:
            self._mailbox.fail(ReallocError(f"sys.exit({error.code!r}) was called during an iteration"))
        except Exception as error:
            if self._mailbox.has_failed:
                raise
            self._mailbox.fail(error)
        finally:
            self.is_running = False
