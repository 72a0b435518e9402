"""Replicas whose weights are kept up to date in the background, while their ranks generate.

Under ``max_staleness`` of 2 and more, the ranks that train do not wait for those that generate. After every training
call they send the trained weights, as a new version. The generating ranks write a version into their replica when they
are between two tokens, or when they may not go on with older weights.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_info

from lightning_realloc.dataflow.dataflow import Dataflow, ModelFunctionCall
from lightning_realloc.dataflow.execution_plan import ExecutionPlan
from lightning_realloc.layout.cluster import ClusterSpec
from lightning_realloc.realloc.delivery import sends_on
from lightning_realloc.realloc.plan import ReallocationPlan
from lightning_realloc.realloc.planner import plan_reallocation
from lightning_realloc.runtime.messages.failure_store import await_watching
from lightning_realloc.runtime.parallel.mesh import MeshRegistry
from lightning_realloc.runtime.parallel.shards import local_tensors, reshard
from lightning_realloc.runtime.transfer.shared_memory import SharedSegment, share_segment
from lightning_realloc.runtime.transfer.version_frames import HostFrames
from lightning_realloc.runtime.transfer.version_stream import VersionReceiver, VersionSender
from lightning_realloc.runtime.transfer.weight_check import WeightSubject
from lightning_realloc.strategies.pool.pool_options import PoolOptions
from lightning_realloc.strategies.pool.replica import Replica

_FIRST_TAG = 1 << 28
"""Tag of the first stream: the host group's lower ones belong to the mailbox and to messages of generations."""


class ReplicaStream:
    """The versions of one replica's weights, from the home replica on other ranks. Made by all ranks together.

    Args:
        target: The replica, which holds the same weights now, filled by its own `WeightCopy`.
        version: Version of these weights: iterations of training.
        group: All ranks, over gloo.
        tag: Number that no other stream of the group, and no message of a mailbox, has.
    """

    def __init__(
        self, home: Replica, target: Replica, version: int, options: PoolOptions, group: dist.ProcessGroup, tag: int
    ) -> None:
        assert target.weight_copy is not None and target.weight_copy.trained is not None, "the replica was filled"
        copied = target.weight_copy.trained
        sent_dtype = min(options.master_dtype, options.copy_dtype, key=lambda dtype: dtype.itemsize)
        way = _plan_stream(home, target, copied.plan, sent_dtype, options, group)
        self.obstacle = way.obstacle
        """Why the ranks of a host receive the same weights separately; None if they do not."""
        self.role = home.role
        self.version = version
        """Version that this rank's part of the replica holds; on other ranks the one it held first."""
        self._home = home
        self._num_due = self._num_received = 0
        self._sender: VersionSender | None = None
        self._receiver: VersionReceiver | None = None
        if home.is_inside:
            source, verify_weights = local_tensors(home.model), options.verify_weights
            self._sender = VersionSender(
                way.plan, source, dtype=sent_dtype, group=group, tag=tag, verify_weights=verify_weights
            )
        elif way.frames is not None:
            self._receiver = VersionReceiver(
                way.frames,
                copied.target_tensors,
                group=group,
                tag=tag,
                segment=way.segment,
                subject=WeightSubject(home.role, home.layout, target.layout, home.rank, "stream"),
                version=version,
            )

    @property
    def senders(self) -> tuple[int, ...]:
        """Ranks that send to this one."""
        return () if self._receiver is None else self._receiver.senders

    def push(self, version: int) -> None:
        """Send the home replica's weights, which were just trained. Every rank calls it after the training call.

        A receiving rank takes the version before, so that the sender, which waits for that, can go on: several batches
        may be trained on while no rank generates.
        """
        self.catch_up()
        self._num_due += 1
        if self._sender is not None:
            reshard(self._home.model)
            await_watching(self._sender.wait, what="ranks that take the last weights")
            self._sender.send(version)

    def has_news(self) -> bool:
        """Return whether a newer version has arrived on this rank."""
        return self._receiver is not None and self._receiver.has_version()

    def take(self) -> int:
        """Write the next version into the replica, and return it; waits for it. Only on the replica's ranks."""
        assert self._receiver is not None, "this rank holds a part of the replica"
        version = self._receiver.receive()
        assert version is not None, "the stream is open"
        self.version, self._num_received = version, self._num_received + 1
        return version

    def catch_up(self) -> None:
        """Write versions into the replica until it holds the latest that was pushed, as far as this rank has come."""
        while self._receiver is not None and self._num_received < self._num_due:
            self.take()

    def close(self) -> None:
        """End the stream with the last pushed version in the replica. Every rank calls it at the same point."""
        self.catch_up()
        if self._sender is not None:
            await_watching(self._sender.close, what="ranks that take the last weights")
        if self._receiver is not None:
            end = self._receiver.receive()
            assert end is None, f"version {end} came after the last one"


class WeightStreams:
    """All streams of a pool, by generating call."""

    def __init__(self, options: PoolOptions) -> None:
        self._options = options
        self._calls: tuple[str, ...] = ()
        """Generating calls whose replicas may be filled in the background."""
        self._open: dict[str, ReplicaStream] = {}
        self._separate: set[str] = set()
        """Calls whose ranks receive weights separately, as the log has said."""
        self.version = 0
        """Iterations of training, as far as this rank has come."""

    def allow(self, dataflow: Dataflow, plan: ExecutionPlan | None, *, frees_copies: bool) -> None:
        """Fill the replicas of generating calls in the background from their next use on, where that is possible.

        Forgets streams that a failed run left open.

        Args:
            plan: Their layouts; None: fill no replica so.
            frees_copies: Whether replicas leave memory between their calls.
        """
        self._open, self._calls = {}, ()
        if plan is None:
            return
        for call in (call for call in dataflow.model_calls if call.kind == "generate"):
            obstacle = "ParameterReallocation frees replicas" if frees_copies else _obstacle(call, dataflow, plan)
            if call.role in self._options.biased:
                obstacle = f"the biases of {call.role}'s routers are updated, which are no weights"
            if obstacle is None:
                self._calls += (call.name,)
            else:
                rank_zero_info(f"weights for {call.name} move between iterations, because {obstacle}")

    def is_allowed(self, call: str) -> bool:
        """Return whether a call's replica is filled in the background once it was filled for the first time."""
        return call in self._calls

    def of(self, call: str) -> ReplicaStream | None:
        """Return the open stream of a call, None without one."""
        return self._open.get(call)

    def open(self, call: str, home: Replica, target: Replica, meshes: MeshRegistry) -> None:
        """Begin the stream of a call that is allowed to have one; ``target`` holds ``version`` now."""
        if call in self._calls and call not in self._open:
            tag = _FIRST_TAG + self._calls.index(call)
            stream = ReplicaStream(home, target, self.version, self._options, meshes.host_group, tag)
            self._open[call] = stream
            if stream.obstacle is not None and call not in self._separate:
                self._separate.add(call)
                rank_zero_info(f"each rank of {call} receives weights of its own, because {stream.obstacle}")

    def push(self, role: str) -> None:
        """Send the weights of a role that was just trained, as the next version. Every rank calls it."""
        for stream in self._of_role(role).values():
            stream.push(self.version + 1)

    def close(self, role: str | None = None) -> None:
        """End the streams of a role, None: all. Every rank calls it at the same point."""
        for call, stream in self._of_role(role).items():
            stream.close()
            del self._open[call]

    def _of_role(self, role: str | None) -> dict[str, ReplicaStream]:
        return {call: stream for call, stream in self._open.items() if role in (None, stream.role)}


class _StreamPlan(NamedTuple):
    """The way of a stream's weights, as one rank knows it."""

    plan: ReallocationPlan
    """With the transfers of this rank."""
    frames: HostFrames | None
    """What lands on this rank's host; None on ranks that do not generate."""
    segment: SharedSegment | None
    """Memory for that; None: memory of the rank's own."""
    obstacle: str | None
    """Why the ranks of a host cannot share what lands; None if they do, or if each needs other weights."""


def _plan_stream(
    home: Replica,
    target: Replica,
    copied: ReallocationPlan,
    dtype: torch.dtype,
    options: PoolOptions,
    group: dist.ProcessGroup,
) -> _StreamPlan:
    """Plan a stream so that weights enter each node once, if its ranks can share memory. Collective over ``group``."""

    def planned(cluster: ClusterSpec | None) -> tuple[ReallocationPlan, HostFrames | None]:
        plan = plan_reallocation(copied.source, copied.target, cluster, element_bytes=dtype.itemsize, rank=home.rank)
        return plan, HostFrames(plan, home.rank, dtype, options.verify_weights) if target.is_inside else None

    plan, frames = planned(options.facts.cluster)
    if not sends_on(plan):
        return _StreamPlan(plan, frames, None, None)
    readers, size = ((), 0) if frames is None else (frames.readers, frames.required_bytes)
    segment, obstacle = share_segment(size, members=readers, group=group)
    if obstacle is None:
        return _StreamPlan(plan, frames, segment, None)
    return _StreamPlan(*planned(None), None, obstacle)


def _obstacle(call: ModelFunctionCall, dataflow: Dataflow, plan: ExecutionPlan) -> str | None:
    """Return why a generating call's replica cannot be filled while its ranks generate; None if it can."""
    role, layout = str(call.role), plan.layout(call.name)
    if role not in dataflow.trained_roles:
        return f"{role} is not trained"
    home = plan.layout(dataflow.home_call(role).name)
    shared = sorted(set(home.ranks) & set(layout.ranks))
    if shared:
        return f"rank {shared[0]} trains and generates"
    if layout.runs_in_lockstep:
        return f"the ranks of {layout} run each block together"
    if role in plan.offload:
        return f"{role} is offloaded between its calls"
    others = [
        other.name
        for other in dataflow.model_calls
        if other.role == role and other.name != call.name and plan.layout(other.name) == layout
    ]
    return f"{others[0]} reads the same weights" if others else None
