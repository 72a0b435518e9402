"""Profile the models of a running algorithm, cache the result on disk, and evaluate other plans by it.

`subjects` chooses the models, and this module the degrees and sizes to measure. `profiler` measures them.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter

import torch
import transformers

from lightning_realloc.dataflow.dataflow import CallKind, Dataflow
from lightning_realloc.dataflow.execution_plan import ExecutionPlan
from lightning_realloc.errors import PlanError
from lightning_realloc.generation.core.capabilities import CAPABILITIES
from lightning_realloc.layout import ParallelDims
from lightning_realloc.layout.cluster import ClusterSpec
from lightning_realloc.layout.model import ModelSpec
from lightning_realloc.output_files import write_text
from lightning_realloc.runtime.messages.objects import gather_objects
from lightning_realloc.runtime.transfer.agreement import TransportName
from lightning_realloc.strategies.algorithm_protocol import RunnableAlgorithm
from lightning_realloc.strategies.calls.overlap import OverlapOptions
from lightning_realloc.strategies.generation_limits import generation_limits
from lightning_realloc.strategies.largest_workload import largest_images, mean_images
from lightning_realloc.strategies.measure.profiler import MAX_BLOCKS, MAX_DECODE_BLOCKS, OutOfTimeError, Profiler
from lightning_realloc.strategies.measure.subjects import Machine, ProfileRequest, SubjectMaker
from lightning_realloc.strategies.pool.builder import PoolBuilder
from lightning_realloc.strategies.pool.memory_check import require_free_memory
from lightning_realloc.tuning.candidates import PlanEvaluator
from lightning_realloc.tuning.estimate.estimator import Estimator
from lightning_realloc.tuning.estimate.hardware import CPU_EFFICIENCY, Efficiency
from lightning_realloc.tuning.estimate.measured import MeasuredEstimator
from lightning_realloc.tuning.estimate.pass_samples import TINY, TINY_STEP, Grid, Size
from lightning_realloc.tuning.estimate.profile import Curve, ProfileTable
from lightning_realloc.tuning.estimate.roofline import RooflineEstimator
from lightning_realloc.tuning.memory.parts import Workload
from lightning_realloc.tuning.search.planning_task import PlanningTask
from lightning_realloc.tuning.search.space import legal_dims, sizes
from lightning_realloc.tuning.shapes.images import ImagesPerPrompt
from lightning_realloc.tuning.shapes.lengths import Lengths, TypicalLengths
from lightning_realloc.tuning.shapes.role_memory import RoleMemory

logger = logging.getLogger(__name__)

MIN_PROFILE_S = 0.15
"""Least seconds for measuring. In less time, too little could be measured to be of use."""
MAX_TOKENS = {"cpu": 1024, "cuda": 16384}
"""Most tokens of a measured micro-batch, by kind of device. Beyond, time grows in proportion to tokens."""
_TRANSPORTS: Mapping[str, tuple[TransportName, ...]] = {"cpu": ("auto", "direct")}
"""Transports to measure, by kind of device; others measure ``direct`` alone. FSDP's shards always use ``direct``."""


@dataclass(frozen=True, slots=True)
class Profile:
    """Measured passes, and each role's shape in them."""

    table: ProfileTable
    """Measured seconds by shape."""
    models: Mapping[str, str]
    """Role -> name of its shape in the table."""


def profile_models(
    builder: PoolBuilder,
    machine: Machine,
    iterations: Sequence[Lengths],
    *,
    cache: Path | None,
    seconds: float = math.inf,
) -> Profile | None:
    """Measure the passes of the algorithm's models on these ranks, or read them from the cache. Collective.

    Args:
        builder: Builder of the algorithm's pool.
        machine: This rank.
        iterations: Lengths of some iterations.
        cache: Folder of cached profiles; None always measures.
        seconds: Time after which no more layouts are measured; unsharded ones may take `MAX_BASE_OVERRUN` times it. A
            profile that was cut short is not cached.

    Returns:
        The profile; None if it is not cached and the time or a device's memory is too little to measure one.

    Raises:
        PlanError: for a role whose model has no decoder's config.
    """
    begin, request = perf_counter(), _request(builder, iterations)
    names, properties = request.shape_names(), _describe_machine(machine)
    path = None if cache is None else cache / f"{_digest(names, request)}.json"
    table = gather_objects(None if path is None or machine.facts.rank else _read_cached(path, properties))[0]
    if table is None and (seconds < MIN_PROFILE_S or not _has_memory(request, machine)):
        return None
    if table is None:
        try:
            table = _measure(SubjectMaker(request, machine, names), properties, seconds)
        except OutOfTimeError:  # on all ranks
            return None
        table = replace(table, seconds=max(gather_objects(perf_counter() - begin)))
        if path is not None and machine.facts.rank == 0 and table.seconds < seconds:
            _write_cache(path, table)
    return Profile(table, names)


def _request(builder: PoolBuilder, iterations: Sequence[Lengths]) -> ProfileRequest:
    typical, module, dataflow = TypicalLengths.from_iterations(iterations), builder.module, _remaining_calls(builder)
    mean = max(1, round(sum(typical.responses) / len(typical.responses)))
    compiled = {role: module.train_options_of(role).compile for role in dataflow.trained_roles}
    return ProfileRequest(
        roles=module.roles(),
        described=builder.describe_roles(),
        dataflow=dataflow,
        workload=_workload(builder, dataflow, typical, prompt_tokens=typical.prompt_tokens, response_tokens=mean),
        mean_response=mean,
        new_optimizer=module.new_optimizer,
        tp_plans=builder.options.tp_plans,
        compiled={role: backend for role, backend in compiled.items() if backend is not None},
        seed=module.seed,
    )


def _has_memory(request: ProfileRequest, machine: Machine) -> bool:
    """Return whether every device has free memory for the measured models; log a warning if not."""
    needed = max(_needed_bytes(role, _grid(request, machine)) for role in request.described.values())
    try:
        require_free_memory(
            needed, machine.facts.device, what="measuring passes", way_out="plans are searched without measurements"
        )
    except PlanError as error:
        if machine.facts.rank == 0:
            logger.warning("%s", error)
        return False
    return True


def _needed_bytes(role: RoleMemory, grid: Grid) -> int:
    """Return about the bytes that measuring one role needs.

    These are models of both depths with and without its head, a copy of one with gradients, and the logits of the
    largest micro-batch.
    """
    blocks = sum(param.numel for param in role.model.params if param.section == "block") / max(1, role.model.num_blocks)
    outside = sum(param.numel for param in role.model.params if param.section != "block")
    depths = 2 * (1 + MAX_BLOCKS) + MAX_DECODE_BLOCKS + 2 * MAX_BLOCKS
    logits = 0 if role.shape is None else max(size.tokens for size in grid.micro_batches) * role.shape.num_outputs
    return int(4 * (depths * blocks + 7 * outside + 2 * logits))


def _write_cache(path: Path, table: ProfileTable) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, table.to_json())
    except OSError as error:
        logger.warning("the profile could not be cached, and the next run measures again: %s", error)


def _describe_machine(machine: Machine) -> dict[str, str]:
    """Return the properties in which a cached profile must match this machine."""
    on_cuda = machine.facts.device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(machine.facts.device) if on_cuda else platform.processor() or "cpu",
        "cores": str(num_cores()),
        "threads": str(torch.get_num_threads()),
        "ranks": str(machine.facts.world_size),
        "dtype": str(machine.options.copy_dtype),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        **({"decoding": "CUDA graphs"} if on_cuda else {}),  # earlier profiles have steps without graphs
    }


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


def _digest(names: Mapping[str, str], request: ProfileRequest) -> str:
    lengths = [_length_bin(request.workload.prompt_tokens), _length_bin(request.mean_response)]
    text = json.dumps([sorted(set(names.values())), lengths, request.workload.num_sequences])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _length_bin(length: int) -> int:
    """Return a length's bin on a logarithmic scale with steps of sqrt(2); lengths in one bin share a profile."""
    return round(2 * torch.tensor(float(max(1, length))).log2().item())


def _read_cached(path: Path, properties: Mapping[str, str]) -> ProfileTable | None:
    """Return the cached profile of this machine; None if there is none. Log a warning if it is of another machine."""
    if not path.exists():
        return None
    try:
        table = ProfileTable.from_json(path.read_text())
    except PlanError as error:
        logger.warning("measuring again, since %s cannot be read: %s", path, error)
        return None
    other = [
        f"{name} {table.machine.get(name)}, now {value}"
        for name, value in properties.items()
        if table.machine.get(name) != value
    ]
    if other:
        logger.warning("measuring again, since the profile %s is of another machine (%s)", path, "; ".join(other))
        return None
    return table


# ---- degrees and sizes
def _measure(maker: SubjectMaker, properties: Mapping[str, str], seconds: float) -> ProfileTable:
    request, machine = maker.request, maker.machine
    profiler, subjects = Profiler(machine, seconds=seconds), maker.make()
    models = {key: request.described[role].model for role, key in maker.names.items()}
    wanted = {one: _degrees(models[one.key], maker.kinds(one.key), machine) for one in subjects}
    passes = profiler.measure_passes(wanted, _grid(request, machine))
    optimizer = {one.key: profiler.measure_optimizer(one) for one in subjects if one.is_trained}
    largest = max(subjects, key=lambda one: one.num_blocks)
    moves: dict[str, Curve] = {}
    for transport in _TRANSPORTS.get(machine.facts.device.type, ("direct",)):
        if not (moves and profiler.is_late):
            moves.update([profiler.measure_reallocation(largest, transport=transport)])
    return ProfileTable(
        machine=properties,
        passes=passes,
        optimizer=optimizer,
        moves=moves,
        offload=None if profiler.is_late else profiler.measure_offload(),
        crowding=profiler.crowding,
    )


def _degrees(model: ModelSpec, kinds: set[CallKind], machine: Machine) -> list[ParallelDims]:
    """Return the degrees that calls may have on one node without pipelines; replicas only in training calls."""
    cluster = replace(machine.facts.cluster, num_nodes=1)
    ranks = min(machine.facts.world_size, cluster.devices_per_node)
    found: dict[ParallelDims, None] = {}
    for size in (size for size in sizes(cluster) if size <= ranks):
        for kind in sorted(kinds):
            for dims in legal_dims(model, kind, size, cluster):
                if dims.pp == dims.ep == 1 and (dims.dp == 1 or kind == "train"):
                    found[dims] = None
    return sorted(found, key=lambda dims: (dims.size, dims.degrees))


def _grid(request: ProfileRequest, machine: Machine) -> Grid:
    load, response = request.workload, max(1, request.mean_response)
    length = load.prompt_tokens + response
    most = max(1, min(load.num_sequences, MAX_TOKENS.get(machine.facts.device.type, 4096) // length))
    batches = sorted({1, load.num_sequences})
    contexts = sorted({load.prompt_tokens + response // 4, load.prompt_tokens + response})
    micro_batches = tuple(Size(count, load.prompt_tokens, response) for count in sorted({1, most}))
    decoding = tuple(Size(count, context, 0) for context in contexts for count in batches)
    hides_communication = machine.facts.device.type != "cpu"
    return Grid(
        micro_batches=micro_batches,
        decoding=decoding,
        probe=micro_batches[-1] if hides_communication else TINY,
        probe_step=decoding[-1] if hides_communication else TINY_STEP,
    )


# ---- other plans
def make_plan_evaluator(
    builder: PoolBuilder,
    plan: ExecutionPlan,
    iterations: Sequence[Lengths],
    overlap: OverlapOptions,
    profile: Profile | None = None,
    factors: Mapping[str, float] | None = None,
) -> PlanEvaluator:
    """Return an evaluator of other plans for the algorithm that runs under ``plan``.

    Args:
        builder: Builder of the algorithm's pool.
        plan: The plan in use.
        iterations: Lengths of some iterations. Memory is checked for the longest response that sampling allows.
        overlap: Calls that may run at the same time.
        profile: Measured passes; None estimates seconds from data sheets alone.
        factors: Call -> its seconds over those of its own model, where environments ask others; None: all 1.

    Raises:
        PlanError: for a role whose model has no decoder's config.
    """
    dataflow, module, on_cpu = _remaining_calls(builder), builder.module, builder.facts.device.type == "cpu"
    cluster, roles = _cluster_of(builder.facts.cluster, builder.facts.world_size), builder.describe_roles()
    _, settings = builder.for_forecast(plan)
    typical = TypicalLengths.from_iterations(iterations)
    longest = max(*typical.responses, _longest_allowed(module, dataflow))
    captures = "captures" in CAPABILITIES[module.engine] and bool(module.generation_options.cuda_graphs)
    usual, most = (read(module.trainer, builder.tower) for read in (mean_images, largest_images))

    def estimate(lengths: TypicalLengths) -> Estimator:
        tokens = {"prompt_tokens": lengths.prompt_tokens, "response_tokens": max(lengths.responses)}
        roofline = RooflineEstimator(
            dataflow,
            cluster,
            roles,
            settings,
            _workload(builder, dataflow, lengths, **tokens, images=usual),
            responses=lengths.responses,
            factors=factors,
            efficiency=CPU_EFFICIENCY if on_cpu else Efficiency(captures_steps=captures),
            cores_per_node=max(1, num_cores() // torch.get_num_threads()) if on_cpu else None,
        )
        return roofline if profile is None else MeasuredEstimator(roofline, profile.table, profile.models)

    estimate(typical)  # raises errors now, not in the first search
    tokens = {"prompt_tokens": typical.longest_prompt, "response_tokens": longest}
    task = PlanningTask(
        dataflow=dataflow,
        roles=roles,
        cluster=cluster,
        settings=settings,
        workload=_workload(builder, dataflow, typical, **tokens, images=most),
        memory_budget=builder.memory_budget,
        overlap=overlap.overlap,
        generation_chunks=overlap.generation_chunks,
        **generation_limits(module),
        delays_weight_gradients=not any(module.train_options_of(role).compile for role in dataflow.trained_roles),
    )
    return PlanEvaluator(task=task, estimate=estimate, lengths=typical)


def _remaining_calls(builder: PoolBuilder) -> Dataflow:
    """Return the dataflow without calls that were precomputed, whose models are freed."""
    return builder.dataflow.without(builder.module.answered_ahead)


def _cluster_of(cluster: ClusterSpec, world_size: int) -> ClusterSpec:
    """Return the part of a cluster that a run of ``world_size`` ranks uses."""
    per_node = cluster.devices_per_node
    if cluster.num_devices == world_size:
        return cluster
    if world_size % per_node == 0:
        return replace(cluster, num_nodes=world_size // per_node)
    return replace(cluster, num_nodes=1, devices_per_node=world_size)


def _workload(
    builder: PoolBuilder,
    dataflow: Dataflow,
    lengths: TypicalLengths,
    *,
    prompt_tokens: int,
    response_tokens: int,
    images: ImagesPerPrompt | None = None,
) -> Workload:
    module = builder.module
    options = module.train_options_of(next(iter(dataflow.trained_roles), ""))
    sampling = getattr(module, "sampling", None)
    return Workload(
        num_sequences=lengths.num_sequences,
        prompt_tokens=prompt_tokens,
        response_tokens=response_tokens,
        micro_batch_tokens=options.micro_batch_tokens_on(builder.facts.device.type),
        num_minibatches=options.num_minibatches,
        num_epochs=options.num_epochs,
        samples_per_prompt=1 if sampling is None else min(sampling.n, lengths.num_sequences),
        images=images,
    )


def _longest_allowed(module: RunnableAlgorithm, dataflow: Dataflow) -> int:
    """Return the most tokens of a response that the module's sampling allows; 1 if it does not generate."""
    sampling = getattr(module, "sampling", None)
    generates = any(call.kind == "generate" for call in dataflow.iteration_calls)
    return int(sampling.max_new_tokens) if generates and sampling is not None else 1
