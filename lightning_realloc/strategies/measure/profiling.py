"""Profile the models of a running algorithm, and cache the result on disk.

This module chooses the models, degrees and sizes to measure. `profiler` measures them.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import logging
import math
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn

from lightning_realloc.batch.packing import PackedBatch
from lightning_realloc.dataflow.dataflow import CallKind, Dataflow
from lightning_realloc.errors import ConfigError, PlanError
from lightning_realloc.generation import GenerationEngine, SamplingParams
from lightning_realloc.layout import ParallelDims
from lightning_realloc.layout.model import ModelSpec
from lightning_realloc.runtime.messages.objects import gather_objects
from lightning_realloc.runtime.parallel.packed_forward import packed_logits, sequence_scores, token_logprobs
from lightning_realloc.runtime.transfer.agreement import TransportName
from lightning_realloc.strategies.calls.engines import Lockstep
from lightning_realloc.strategies.measure.profile_subject import Machine, Subject
from lightning_realloc.strategies.measure.profiler import MAX_BLOCKS, MAX_DECODE_BLOCKS, Profiler
from lightning_realloc.strategies.pool.memory_check import require_free_memory
from lightning_realloc.tuning.estimate.pass_samples import TINY, TINY_STEP, Grid, Size
from lightning_realloc.tuning.estimate.profile import Curve, ProfileTable
from lightning_realloc.tuning.memory.parts import Workload
from lightning_realloc.tuning.search.space import legal_dims, sizes
from lightning_realloc.tuning.shapes.role_memory import RoleMemory

logger = logging.getLogger(__name__)

MIN_PROFILE_S = 0.15
"""Least seconds for measuring. In less time, too little could be measured to be of use."""
MAX_TOKENS = {"cpu": 1024, "cuda": 16384}
"""Most tokens of a measured micro-batch, by kind of device. Beyond, time grows in proportion to tokens."""


_TRANSPORTS: Mapping[str, tuple[TransportName, ...]] = {"cpu": ("auto", "direct")}
"""Transports to measure, by kind of device; others measure ``direct`` alone. FSDP's shards always use ``direct``."""
_OUTSIDE_OF_BLOCKS = ("vocab_size", "num_labels", "id2label", "label2id", "architectures", "tie_word_embeddings")
"""Entries of a model's config that do not change its blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRequest:
    """Models of an algorithm to measure, and the sizes of their passes."""

    roles: Sequence[Any]
    """``algorithms.base.role.Role`` of every model."""
    described: Mapping[str, RoleMemory]
    """Role -> its description."""
    dataflow: Dataflow
    """Calls that run."""
    workload: Workload
    """Sequences and tokens of an iteration."""
    mean_response: int
    """Mean tokens of a response: the length of measured micro-batches, and about that of decoding."""
    new_optimizer: Callable[[str, list[nn.Parameter]], torch.optim.Optimizer]
    """(role, parameters) -> the role's optimizer."""
    tp_plans: Mapping[str, Mapping[str, str]]
    """Role -> tensor-parallel styles, for models without a plan of their own."""
    compiled: Mapping[str, str]
    """Role -> backend of ``torch.compile`` for its blocks in training calls; only roles that are compiled."""
    seed: int
    """Seed of the measured models' random weights."""


def shape_names(request: ProfileRequest) -> dict[str, str]:
    """Return role -> name of its shape; roles whose passes cost the same share a name.

    Raises:
        PlanError: for a role without a config.
    """
    texts = {}
    for role in request.roles:
        config = role.config()
        if config is None:
            raise PlanError(
                f"role {role.name!r} is a module without a Hugging Face config and cannot be measured block by block; "
                f"give it a model of transformers"
            )
        description = [role.task, config.to_dict(), *role.describe_adapters()]
        texts[role.name] = json.dumps(description, sort_keys=True, default=str)
    # Only training is compiled, so a frozen role can share the profile of a compiled trained role of its shape.
    backends = {texts[name]: backend for name, backend in request.compiled.items() if name in texts}
    backends = {name: backends.get(text, "") for name, text in texts.items()}
    backends |= {role.name: request.compiled.get(role.name, "") for role in request.roles if role.trained}
    return {name: hashlib.sha256((text + backends[name]).encode()).hexdigest()[:16] for name, text in texts.items()}


@dataclass(frozen=True, slots=True)
class Profile:
    """Measured passes, and each role's shape in them."""

    table: ProfileTable
    """Measured seconds by shape."""
    models: Mapping[str, str]
    """Role -> name of its shape in the table."""


def profile_models(
    request: ProfileRequest, machine: Machine, cache: Path | None, *, seconds: float = math.inf
) -> Profile | None:
    """Measure the request's models on these ranks, or read them from the cache. Collective.

    Args:
        request: The models and sizes.
        machine: This rank.
        cache: Folder of cached profiles; None always measures.
        seconds: Time after which no more layouts are measured. A profile that was cut short is not cached.

    Returns:
        The profile; None if it is not cached and the time or a device's memory is too little to measure.
    """
    begin = perf_counter()
    names, properties = shape_names(request), describe_machine(machine)
    path = None if cache is None else cache / f"{_digest(names, request)}.json"
    table = gather_objects(None if path is None or machine.rank else _read_cached(path, properties))[0]
    if table is None and (seconds < MIN_PROFILE_S or not _has_memory(request, machine)):
        return None
    if table is None:
        table = _measure(request, machine, names, properties, seconds)
        table = replace(table, seconds=max(gather_objects(perf_counter() - begin)))
        if path is not None and machine.rank == 0 and table.seconds < seconds:
            _write_cache(path, table)
    return Profile(table, names)


def _has_memory(request: ProfileRequest, machine: Machine) -> bool:
    """Return whether every device has free memory for the measured models; log a warning if not."""
    needed = max(_needed_bytes(role, _grid(request, machine)) for role in request.described.values())
    try:
        require_free_memory(
            needed, machine.device, what="measuring passes", way_out="plans are searched without measurements"
        )
    except PlanError as error:
        if machine.rank == 0:
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
        path.write_text(table.to_json())
    except OSError as error:
        logger.warning("the profile could not be cached, and the next run measures again: %s", error)


def describe_machine(machine: Machine) -> dict[str, str]:
    """Return the properties in which a cached profile must match this machine."""
    on_cuda = machine.device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(machine.device) if on_cuda else platform.processor() or "cpu",
        "cores": str(num_cores()),
        "threads": str(torch.get_num_threads()),
        "ranks": str(machine.world_size),
        "dtype": str(machine.copy_dtype),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
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


# ---- models, degrees and sizes
def _measure(
    request: ProfileRequest, machine: Machine, names: Mapping[str, str], properties: Mapping[str, str], seconds: float
) -> ProfileTable:
    profiler = Profiler(machine, seconds=seconds)
    subjects, grid = _subjects(request, machine, names), _grid(request, machine)
    largest = max(subjects, key=lambda one: one.num_blocks)
    wanted = {
        subject: _degrees(
            request.described[_role_of(names, subject.key)].model, _kinds(request, names, subject.key), machine
        )
        for subject in subjects
    }
    passes = profiler.measure_passes(wanted, grid)
    optimizer = {one.key: profiler.measure_optimizer(one) for one in subjects if one.is_trained}
    moves: dict[str, Curve] = {}
    for transport in _TRANSPORTS.get(machine.device.type, ("direct",)):
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


def _role_of(names: Mapping[str, str], key: str) -> str:
    return next(role for role, name in names.items() if name == key)


def _kinds(request: ProfileRequest, names: Mapping[str, str], key: str) -> set[CallKind]:
    return {call.kind for call in request.dataflow.model_calls if names[str(call.role)] == key}


def _degrees(model: ModelSpec, kinds: set[CallKind], machine: Machine) -> list[ParallelDims]:
    """Return the degrees that calls may have on one node without pipelines; replicas only in training calls."""
    cluster = replace(machine.cluster, num_nodes=1)
    ranks = min(machine.world_size, cluster.devices_per_node)
    found: dict[ParallelDims, None] = {}
    for size in (size for size in sizes(cluster) if size <= ranks):
        for kind in sorted(kinds):
            for dims in legal_dims(model, kind, size, cluster):
                if dims.pp == 1 and (dims.dp == 1 or kind == "train"):
                    found[dims] = None
    return sorted(found, key=lambda dims: (dims.size, dims.degrees))


def _grid(request: ProfileRequest, machine: Machine) -> Grid:
    load, response = request.workload, max(1, request.mean_response)
    length = load.prompt_tokens + response
    most = max(1, min(load.num_sequences, MAX_TOKENS.get(machine.device.type, 4096) // length))
    batches = sorted({1, load.num_sequences})
    contexts = sorted({load.prompt_tokens + response // 4, load.prompt_tokens + response})
    micro_batches = tuple(Size(count, load.prompt_tokens, response) for count in sorted({1, most}))
    decoding = tuple(Size(count, context, 0) for context in contexts for count in batches)
    hides_communication = machine.device.type != "cpu"
    return Grid(
        micro_batches=micro_batches,
        decoding=decoding,
        probe=micro_batches[-1] if hides_communication else TINY,
        probe_step=decoding[-1] if hides_communication else TINY_STEP,
    )


# ---- subjects
def _subjects(request: ProfileRequest, machine: Machine, names: Mapping[str, str]) -> list[Subject]:
    chosen: dict[str, Any] = {}
    for role in request.roles:  # a trained role represents frozen ones of its shape
        if role.name in request.dataflow.roles and (names[role.name] not in chosen or role.trained):
            chosen[names[role.name]] = role
    bare: dict[str, Subject | None] = {}
    subjects: list[Subject] = []
    # The first model with given blocks measures the additions of shards, so the one with the most kinds of calls leads.
    ordered = sorted(chosen.items(), key=lambda item: (not item[1].trained, not _generates(request, names, item[0])))
    for key, role in ordered:
        blocks = _block_key(role) + request.compiled.get(role.name, "")
        if blocks not in bare:
            bare[blocks] = _bare_subject(role, blocks, request, machine)
        decode = _decoder(machine) if _generates(request, names, key) else None
        subjects.append(_subject(role, key, request, machine, decode=decode, bare=bare[blocks], like=role.name))
    return subjects


def _generates(request: ProfileRequest, names: Mapping[str, str], key: str) -> bool:
    return "generate" in _kinds(request, names, key)


def _block_key(role: Any) -> str:
    """Return a name that models with equal blocks share, whatever their embeddings and heads."""
    content = {name: value for name, value in role.config().to_dict().items() if name not in _OUTSIDE_OF_BLOCKS}
    return json.dumps(content, sort_keys=True, default=str)


def _bare_subject(role: Any, key: str, request: ProfileRequest, machine: Machine) -> Subject | None:
    """Return a role's blocks with a head of one score; None if transformers has no such model of its family."""
    scorer = replace(role, task="token_classification")
    try:
        scorer.describe()
    except ConfigError:
        return None
    return _subject(scorer, key, request, machine, decode=None, bare=None, like=role.name)


def _subject(
    role: Any, key: str, request: ProfileRequest, machine: Machine, *, decode: Any, bare: Subject | None, like: str
) -> Subject:
    """Return a role as a subject, with the settings of the role ``like``."""
    model = request.described[like].model
    return Subject(
        key=key,
        num_blocks=model.num_blocks,
        num_outside=sum(param.numel for param in model.params if param.section != "block"),
        build=lambda depth: _build(role, depth, machine.device, request.seed),
        forward=_FORWARDS[role.task],
        is_trained=role.trained,
        new_optimizer=lambda parameters: request.new_optimizer(like, parameters),
        decode=decode,
        tp_plan=request.tp_plans.get(like),
        compile=request.compiled.get(like),
        bare=bare,
    )


def _build(role: Any, depth: int, device: torch.device, seed: int) -> nn.Module:
    """Return a model of the role's kind with ``depth`` blocks and random weights."""
    config = copy.deepcopy(role.config())
    assert config is not None, "shape_names refuses roles without config"
    text = config.get_text_config()
    count = text.num_hidden_layers
    for name, value in vars(text).items():
        if isinstance(value, list) and len(value) == count:  # one entry per block, as layer_types
            setattr(text, name, (value * depth)[:depth])
    text.num_hidden_layers = depth
    with device:
        model: nn.Module = role.resembling(config).build(seed=seed)
    return model


def _scores_of_tokens(model: nn.Module, pack: PackedBatch) -> Tensor:
    return packed_logits(model, pack)[pack.predecessors, 0]


def _logprobs(model: nn.Module, pack: PackedBatch) -> Tensor:
    return token_logprobs(model, pack, with_entropy=torch.is_grad_enabled(), only_responses=True).logprobs


_FORWARDS: Mapping[str, Callable[[nn.Module, PackedBatch], Tensor]] = {
    "causal_lm": _logprobs,
    "token_classification": _scores_of_tokens,
    "sequence_classification": sequence_scores,
}


def _decoder(machine: Machine) -> Callable[[nn.Module, dist.ProcessGroup | None, Size, int], list[float]]:
    def decode(model: nn.Module, group: dist.ProcessGroup | None, size: Size, num_steps: int) -> list[float]:
        lockstep = None if group is None else Lockstep(group, machine.device)
        ticks: list[float] = []

        def tick(has_work: bool) -> bool:
            goes_on = has_work if lockstep is None else lockstep(has_work)
            if machine.device.type == "cuda":
                torch.cuda.synchronize(machine.device)
            ticks.append(machine.clock())
            return goes_on

        engine = GenerationEngine(model, max_slots=size.sequences, lockstep=tick)
        params = SamplingParams(max_new_tokens=num_steps + 2, ignore_eos=True, n=size.sequences)
        config: Any = model.config
        room = getattr(config.get_text_config(), "max_position_embeddings", math.inf) - params.max_new_tokens
        engine.generate([[3] * int(max(1, min(size.prompt, room)))], params)
        steps = [end - begin for begin, end in itertools.pairwise(ticks)]
        return steps[2:]  # the first step is the prefill, the second one warms up decoding

    return decode
