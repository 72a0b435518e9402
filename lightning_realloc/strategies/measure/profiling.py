"""Which models, layouts and sizes of a running algorithm are worth measuring, and where the result is kept.

What is measured is in ``runtime.profiler``; here roles become its subjects, and a cache on disk spares the next run.
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
from lightning_realloc.strategies.calls.lockstep import Lockstep
from lightning_realloc.strategies.measure.profile_subject import Machine, Subject
from lightning_realloc.strategies.measure.profiler import MOST_BLOCKS, MOST_DECODING_BLOCKS, Profiler
from lightning_realloc.strategies.pool.memory_probe import require_free_memory
from lightning_realloc.tuning.estimate.pass_samples import TINY, TINY_STEP, Grid, Size
from lightning_realloc.tuning.estimate.profile import Curve, ProfileTable
from lightning_realloc.tuning.memory.parts import Workload
from lightning_realloc.tuning.search.space import legal_dims, sizes
from lightning_realloc.tuning.shapes.role_memory import RoleMemory

logger = logging.getLogger(__name__)

LEAST_S = 0.15
"""With less, measuring would not get far enough to be worth anything."""
MAX_TOKENS = {"cpu": 1024, "cuda": 16384}
"""Most tokens of one measured micro-batch; beyond, time grows in proportion."""


_TRANSPORTS: Mapping[str, tuple[TransportName, ...]] = {"cpu": ("auto", "direct")}
"""What is measured, by kind of device; direct alone elsewhere. Shards that FSDP allocates are always sent to."""
_OUTSIDE_OF_BLOCKS = ("vocab_size", "num_labels", "id2label", "label2id", "architectures", "tie_word_embeddings")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRequest:
    """What is to be known about."""

    roles: Sequence[Any]
    """``algorithms.role.Role`` of every model."""
    described: Mapping[str, RoleMemory]
    dataflow: Dataflow
    workload: Workload
    mean_response: int
    """Tokens; micro-batches are measured at this length, decoding around it."""
    new_optimizer: Callable[[str, list[nn.Parameter]], torch.optim.Optimizer]
    tp_plans: Mapping[str, Mapping[str, str]]
    compiled: Mapping[str, str]
    """Role -> the backend of ``torch.compile`` that runs its blocks in training calls; others are left out."""
    seed: int


def shape_names(request: ProfileRequest) -> dict[str, str]:
    """Return role -> a name that roles share whose passes cost the same. Raises PlanError for a role without config."""
    texts = {}
    for role in request.roles:
        config = role.config()
        if config is None:
            raise PlanError(
                f"role {role.name!r} is a module without a Hugging Face config, and cannot be measured block by block; "
                f"give it a model of transformers"
            )
        texts[role.name] = json.dumps([role.task, config.to_dict(), *role.describe_adapters()], sort_keys=True,
                                      default=str)  # fmt: skip
    # Training alone is compiled: a frozen role passes as a trained one does that it looks like.
    backends = {texts[name]: backend for name, backend in request.compiled.items() if name in texts}
    backends = {name: backends.get(text, "") for name, text in texts.items()}
    backends |= {role.name: request.compiled.get(role.name, "") for role in request.roles if role.trained}
    return {name: hashlib.sha256((text + backends[name]).encode()).hexdigest()[:16] for name, text in texts.items()}


@dataclass(frozen=True, slots=True)
class Profile:
    """What was measured, and of which of its shapes every role is."""

    table: ProfileTable
    models: Mapping[str, str]


def profile_models(
    request: ProfileRequest, machine: Machine, cache: Path | None, *, seconds: float = math.inf
) -> Profile | None:
    """Return what is known about the request's models on these ranks, measuring what is not. Collective.

    After ``seconds`` no more layouts are measured, and what was is not kept for later runs. None where nothing is known
    and the time, or a device's memory, suffices for nothing.
    """
    begin = perf_counter()
    names, facts = shape_names(request), machine_facts(machine)
    path = None if cache is None else cache / f"{_digest(names, request)}.json"
    table = gather_objects(None if path is None or machine.rank else _read(path, facts))[0]
    if table is None and (seconds < LEAST_S or not _has_room(request, machine)):
        return None
    if table is None:
        table = _measure(request, machine, names, facts, seconds)
        table = replace(table, seconds=max(gather_objects(perf_counter() - begin)))
        if path is not None and machine.rank == 0 and table.seconds < seconds:
            _write(path, table)
    return Profile(table, names)


def _has_room(request: ProfileRequest, machine: Machine) -> bool:
    """Whether every device has room for the models of a few blocks, beside what it holds; says so where not."""
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
    """Return about what is measured of one role: models of both depths with and without its head, a copy of one with
    gradients, and the logits of the largest micro-batch."""
    blocks = sum(param.numel for param in role.model.params if param.section == "block") / max(1, role.model.num_blocks)
    outside = sum(param.numel for param in role.model.params if param.section != "block")
    depths = 2 * (1 + MOST_BLOCKS) + MOST_DECODING_BLOCKS + 2 * MOST_BLOCKS
    logits = 0 if role.shape is None else max(size.tokens for size in grid.micro_batches) * role.shape.num_outputs
    return int(4 * (depths * blocks + 7 * outside + 2 * logits))


def _write(path: Path, table: ProfileTable) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(table.to_json())
    except OSError as error:
        logger.warning("the profile was not kept, and is measured again next time: %s", error)


def machine_facts(machine: Machine) -> dict[str, str]:
    """Return what a profile must share with the machine that it is read on."""
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
    """Return how many cores this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


def _digest(names: Mapping[str, str], request: ProfileRequest) -> str:
    lengths = [_octave(request.workload.prompt_tokens), _octave(request.mean_response)]
    text = json.dumps([sorted(set(names.values())), lengths, request.workload.num_sequences])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _octave(length: int) -> int:
    """Lengths within a factor of the square root of two share a profile."""
    return round(2 * torch.tensor(float(max(1, length))).log2().item())


def _read(path: Path, facts: Mapping[str, str]) -> ProfileTable | None:
    """Return a cached profile of this machine, None without one; says so of one of another machine."""
    if not path.exists():
        return None
    try:
        table = ProfileTable.from_json(path.read_text())
    except PlanError as error:
        logger.warning("%s is measured anew: %s", path, error)
        return None
    other = [f"{name} {table.machine.get(name)}, now {value}" for name, value in facts.items()
             if table.machine.get(name) != value]  # fmt: skip
    if other:
        logger.warning("the profile %s is of another machine (%s) and is measured anew", path, "; ".join(other))
        return None
    return table


# ---- what is measured
def _measure(
    request: ProfileRequest, machine: Machine, names: Mapping[str, str], facts: Mapping[str, str], seconds: float
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
    passes = profiler.passes(wanted, grid)
    optimizer = {one.key: profiler.optimizer(one) for one in subjects if one.is_trained}
    moves: dict[str, Curve] = {}
    for transport in _TRANSPORTS.get(machine.device.type, ("direct",)):
        if not (moves and profiler.is_late):
            moves.update([profiler.moves(largest, transport=transport)])
    return ProfileTable(
        machine=facts, passes=passes, optimizer=optimizer, moves=moves,
        offload=None if profiler.is_late else profiler.offload(), crowding=profiler.crowding,
    )  # fmt: skip


def _role_of(names: Mapping[str, str], key: str) -> str:
    return next(role for role, name in names.items() if name == key)


def _kinds(request: ProfileRequest, names: Mapping[str, str], key: str) -> set[CallKind]:
    return {call.kind for call in request.dataflow.model_calls if names[str(call.role)] == key}


def _degrees(model: ModelSpec, kinds: set[CallKind], machine: Machine) -> list[ParallelDims]:
    """Return the degrees that calls may have on a node, pipelines aside; replicas only where gradients meet."""
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
    hides = machine.device.type != "cpu"
    return Grid(
        micro_batches=micro_batches, decoding=decoding, probe=micro_batches[-1] if hides else TINY,
        probe_step=decoding[-1] if hides else TINY_STEP,
    )  # fmt: skip


# ---- subjects
def _subjects(request: ProfileRequest, machine: Machine, names: Mapping[str, str]) -> list[Subject]:
    chosen: dict[str, Any] = {}
    for role in request.roles:  # a trained role speaks for a frozen one of its shape
        if role.name in request.dataflow.roles and (names[role.name] not in chosen or role.trained):
            chosen[names[role.name]] = role
    bare: dict[str, Subject | None] = {}
    subjects: list[Subject] = []
    # What shards add is measured with the first one of its blocks: the one that does most.
    does_most = sorted(chosen.items(), key=lambda item: (not item[1].trained, not _generates(request, names, item[0])))
    for key, role in does_most:
        blocks = _digest_of_blocks(role) + request.compiled.get(role.name, "")
        if blocks not in bare:
            bare[blocks] = _bare_subject(role, blocks, request, machine)
        decode = _decoder(machine) if _generates(request, names, key) else None
        subjects.append(_subject(role, key, request, machine, decode=decode, bare=bare[blocks], like=role.name))
    return subjects


def _generates(request: ProfileRequest, names: Mapping[str, str], key: str) -> bool:
    return "generate" in _kinds(request, names, key)


def _digest_of_blocks(role: Any) -> str:
    """Return a name that models share whose blocks are alike, whatever is before and after them."""
    content = {name: value for name, value in role.config().to_dict().items() if name not in _OUTSIDE_OF_BLOCKS}
    return json.dumps(content, sort_keys=True, default=str)


def _bare_subject(role: Any, key: str, request: ProfileRequest, machine: Machine) -> Subject | None:
    """Return a role's blocks with one score behind them; None where transformers has no such model of its family."""
    scorer = replace(role, task="token_classification")
    try:
        scorer.describe()
    except ConfigError:
        return None
    return _subject(scorer, key, request, machine, decode=None, bare=None, like=role.name)


def _subject(
    role: Any, key: str, request: ProfileRequest, machine: Machine, *, decode: Any, bare: Subject | None, like: str
) -> Subject:
    """Return a role as a subject, with the settings of the role that it is ``like``."""
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
    """Return a model like the role's, of some blocks, with random weights."""
    config = copy.deepcopy(role.config())
    assert config is not None, "shape_names has looked"
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
    "causal_lm": _logprobs, "token_classification": _scores_of_tokens, "sequence_classification": sequence_scores,
}  # fmt: skip


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
        return steps[2:]  # the first one reads the prompt, the second is the first of its kind

    return decode
