"""How long does a model's pass take on the ranks that are here, block by block? Measured, in seconds not minutes.

A model of one block and one of a few more run through the same code as the real one; their difference is a block, what
is left is everything else. Ranks outside a layout wait meanwhile, asleep: nobody is in the way of what is measured.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from lightning_realloc.layout import AXES, Layout, ModelLayout, ParallelDims
from lightning_realloc.layout.cluster import ClusterSpec
from lightning_realloc.runtime.executor import Reallocation
from lightning_realloc.runtime.mesh import MeshRegistry
from lightning_realloc.runtime.model_spec import describe_model
from lightning_realloc.runtime.packing import PackedBatch
from lightning_realloc.runtime.parallelize import needs_fsdp, parallelize, tensor_parallelize
from lightning_realloc.runtime.samples import Ragged, Samples
from lightning_realloc.runtime.shards import local_tensors
from lightning_realloc.runtime.tensor_parallel import slice_parameters
from lightning_realloc.runtime.training import pack_columns
from lightning_realloc.runtime.training_mode import set_training_mode
from lightning_realloc.tuning.profile import Curve, PassKey, PassKind, PassTimes, Surface

REPEATS = 2
"""Timed runs of each pass, after one that is not counted; the fastest counts: others were in its way the least."""
DECODE_STEPS = 6
MOST_BLOCKS = 3
"""Of a measured model: more divide the clock's noise by more, and take longer."""


class Size(NamedTuple):
    """A micro-batch of equal sequences."""

    sequences: int
    prompt: int
    response: int

    @property
    def tokens(self) -> int:
        """Of all sequences."""
        return self.sequences * (self.prompt + self.response)


PROBE = Size(1, 8, 8)
"""A pass that computes next to nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Where passes are measured."""

    micro_batches: tuple[Size, ...]
    decoding: tuple[Size, ...] = ()
    """Decoding steps of sequences with prompts as long as their context; the smallest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A model whose passes are measured."""

    key: str
    """Name of its shape in the table."""
    num_blocks: int
    """Of the real model."""
    build: Callable[[int], nn.Module]
    """Number of blocks -> a model with full weights on the device, the same on every rank."""
    forward: Callable[[nn.Module, PackedBatch], Tensor]
    """What a call makes of a pack: one number per token or per sequence."""
    is_trained: bool
    new_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    decode: Callable[[nn.Module, dist.ProcessGroup | None, int, int], Sequence[float]] | None = None
    """(model, group that steps together, sequences, context) -> seconds of decoding steps; None: it does not."""
    tp_plan: Mapping[str, str] | None = None
    like: str | None = None
    """The key of a subject with the same blocks, whose passes were measured before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """This rank, and how it computes."""

    meshes: MeshRegistry
    device: torch.device
    rank: int
    world_size: int
    cluster: ClusterSpec
    copy_dtype: torch.dtype
    mixed_precision: MixedPrecisionPolicy | None
    """Of wrapped models that are trained."""
    forward_context: Callable[[bool], AbstractContextManager[object]]
    """Whether FSDP wraps the model -> the context of a training forward pass."""
    clock: Callable[[], float] = time.perf_counter


class Point(NamedTuple):
    """One pass to be timed."""

    kind: PassKind
    size: Size


Readings = Mapping[Point, tuple[float, float]]
"""Seconds of a block, and of the rest."""


class Profiler:
    """Measures passes, the slowdown of crowded nodes, and reallocations. All methods are collective over all ranks."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._wholes: dict[tuple[str, int], nn.Module] = {}
        self._bases: dict[tuple[str, int], Readings] = {}
        self._additions: dict[str, dict[ParallelDims, Readings]] = {}

    def passes(
        self, subject: Subject, dims: Sequence[ParallelDims], grid: Grid, *, slowdown: Sequence[float]
    ) -> dict[PassKey, PassTimes]:
        """Return how long a model's passes take under ``dims``, on the first ranks, all others waiting.

        Tensor parallelism divides what is computed, and is measured at every size. What sharding and replicas add are
        weights and gradients on their way, the same for every size: each degree of each of the two is measured at the
        smallest size, without the other axes, and put on top of what tensor parallelism takes.
        """
        degrees = sorted({one.tp for one in dims})
        alone = sorted({only for one in dims for only in _single_axes(one)}, key=lambda one: one.degrees)
        self._machine.meshes.create(Layout(one, tuple(range(one.size))) for one in (*map(_tp, degrees), *alone))
        bases = {tp: self._base(subject, tp, grid) for tp in degrees}
        if subject.like is None:
            start = bases.get(1) or self._base(subject, 1, grid)
            self._additions[subject.key] = {one: self._addition(subject, one, start, grid, slowdown) for one in alone}
        additions = self._additions[subject.like or subject.key]
        measured: dict[PassKey, PassTimes] = {}
        for one in dims:
            readings = _put_on_top(bases[one.tp], one, additions, slowdown)
            for kind, times in _surfaces(readings, grid).items():
                measured[PassKey(subject.key, kind, one)] = times
        return measured

    def _base(self, subject: Subject, tp: int, grid: Grid) -> Readings:
        """Return what tensor parallelism takes; of blocks like another subject's, only the rest is timed."""
        layout, points = Layout(_tp(tp), tuple(range(tp))), _all_points(subject, grid)
        if subject.like is None:
            self._bases[subject.key, tp] = self._read(subject, layout, points)
            return self._bases[subject.key, tp]
        known = self._bases[subject.like, tp]
        whole = self._slowest(layout, lambda: self._works(subject, 1, layout, points), count=len(points))
        return {point: (known[point][0], max(0.0, seconds - known[point][0]))
                for point, seconds in zip(points, whole, strict=True)}  # fmt: skip

    def _addition(
        self, subject: Subject, dims: ParallelDims, base: Readings, grid: Grid, slowdown: Sequence[float]
    ) -> Readings:
        """Return what one axis adds to the base, a block's part and the rest's; negative ones are noise."""
        probes = [point for point in _probes(subject, grid) if dims.dp == 1 or point.kind.startswith("train")]
        found = self._read(subject, Layout(dims, tuple(range(dims.size))), probes)
        crowding = slowdown[dims.size - 1]
        added = {}
        for point, (block, rest) in found.items():
            without = base[Point(_without_reduction(point.kind), point.size)]
            added[point] = max(0.0, block - crowding * without[0]), max(0.0, rest - crowding * without[1])
        return added

    def slowdown(self, subject: Subject, size: Size) -> tuple[float, ...]:
        """Return how many times longer a pass takes when 1, 2, ... ranks of a node do it side by side."""
        model = self._whole(subject, self._depths(subject)[1])
        busiest = min(self._machine.world_size, self._machine.cluster.devices_per_node)
        counts = sorted({1, 2, busiest // 2, busiest} - {0})
        pack = _pack(size, self._machine.device)
        seconds = {}
        for count in counts:
            layout = Layout(ParallelDims(dp=count), tuple(range(count)))
            self._machine.meshes.create([layout])
            seconds[count] = self._slowest(layout, lambda: [self._infer_pass(subject, model, pack)])[0]
        curve = Curve.through((count, took / seconds[1]) for count, took in seconds.items())
        return tuple(max(1.0, curve(count)) for count in range(1, busiest + 1)) if busiest > 1 else (1.0,)

    def moves(self, subject: Subject, *, transport: str) -> Curve:
        """Return seconds of a reallocation over the bytes that the busiest rank writes or receives."""
        world = self._machine.world_size
        source = Layout(ParallelDims(fsdp=world), tuple(range(world)))
        target = Layout(ParallelDims(dp=world), tuple(range(world)))
        self._machine.meshes.create([source, target])
        return Curve.through(self._move(subject, depth, source, target, transport) for depth in self._depths(subject))

    # ---- one layout
    def _read(self, subject: Subject, layout: Layout, points: Sequence[Point]) -> Readings:
        """Time passes with few and with more blocks."""
        shallow, deep = self._depths(subject)
        few, many = (
            self._slowest(layout, lambda depth=depth: self._works(subject, depth, layout, points), count=len(points))  # type: ignore[misc]
            for depth in (shallow, deep)
        )
        blocks = [max(0.0, b - a) / (deep - shallow) for a, b in zip(few, many, strict=True)]
        rests = [max(0.0, a - shallow * block) for a, block in zip(few, blocks, strict=True)]
        return dict(zip(points, zip(blocks, rests, strict=True), strict=True))

    def _works(
        self, subject: Subject, depth: int, layout: Layout, points: Sequence[Point]
    ) -> Iterator[Callable[[], object] | list[float]]:
        """Yield what is to be timed on this rank, or the times of decoding, which takes them itself."""
        models: dict[bool, nn.Module] = {}
        for kind, size in points:
            trains = kind.startswith("train")
            if trains not in models:
                lay_out = self._copy_for_training if trains else self._copy_for_inference
                models[trains] = lay_out(subject, depth, layout)
            pack = _pack(size, self._machine.device)
            if kind == "decode":
                yield self._decoded(subject, models[False], layout, size)
            elif kind == "infer":
                yield self._infer_pass(subject, models[False], pack)
            else:
                yield self._train_pass(subject, models[True], pack, is_last=kind == "train_last")

    def _infer_pass(self, subject: Subject, model: nn.Module, pack: Callable[[], PackedBatch]) -> Callable[[], object]:
        def run() -> object:
            with torch.no_grad():
                return subject.forward(model, pack()).to("cpu")

        return run

    def _train_pass(
        self, subject: Subject, model: nn.Module, pack: Callable[[], PackedBatch], *, is_last: bool
    ) -> Callable[[], object]:
        is_wrapped = isinstance(model, FSDPModule)

        def run() -> None:
            if isinstance(model, FSDPModule):
                model.set_requires_gradient_sync(is_last)
            with self._machine.forward_context(is_wrapped):
                loss = subject.forward(model, pack()).float().sum()
            loss.backward()  # type: ignore[no-untyped-call]
            if is_last:
                model.zero_grad(set_to_none=True)

        return run

    def _decoded(self, subject: Subject, model: nn.Module, layout: Layout, size: Size) -> list[float]:
        assert subject.decode is not None, "points of decoding are for models that do"
        meshes = self._machine.meshes
        self._meet(meshes.group(layout, *AXES))
        seconds = subject.decode(model, meshes.group(layout, "fsdp"), size.sequences, size.prompt)
        return [median(seconds)] * REPEATS

    # ---- models
    def _depths(self, subject: Subject) -> tuple[int, int]:
        """Return two numbers of blocks to be compared, one and a few."""
        return 1, max(2, min(subject.num_blocks, MOST_BLOCKS))

    def _whole(self, subject: Subject, depth: int) -> nn.Module:
        if (subject.key, depth) not in self._wholes:
            self._wholes[subject.key, depth] = subject.build(depth)
        return self._wholes[subject.key, depth]

    def _copy_for_inference(self, subject: Subject, depth: int, layout: Layout) -> nn.Module:
        machine = self._machine
        model = copy.deepcopy(self._whole(subject, depth)).to(machine.copy_dtype).requires_grad_(False).eval()
        target = ModelLayout(describe_model(model, tp_plan=subject.tp_plan), layout)
        if needs_fsdp(model, layout):
            return parallelize(model, target, machine.meshes, tp_plan=subject.tp_plan)
        if tensor_parallelize(model, layout, machine.meshes, tp_plan=subject.tp_plan):
            slice_parameters(model, target, machine.rank)
        return model

    def _copy_for_training(self, subject: Subject, depth: int, layout: Layout) -> nn.Module:
        machine = self._machine
        model = copy.deepcopy(self._whole(subject, depth)).requires_grad_(True)
        policy = machine.mixed_precision if needs_fsdp(model, layout) else None
        target = ModelLayout(describe_model(model, tp_plan=subject.tp_plan), layout)
        parallelize(model, target, machine.meshes, mixed_precision=policy, tp_plan=subject.tp_plan)
        set_training_mode(model, dropout=False)
        return model

    # ---- reallocations and steps
    def _move(
        self, subject: Subject, depth: int, source: Layout, target: Layout, transport: str
    ) -> tuple[float, float]:
        machine = self._machine
        model = copy.deepcopy(self._whole(subject, depth)).requires_grad_(False)
        spec = describe_model(model, tp_plan=subject.tp_plan)
        home, copied = ModelLayout(spec, source), ModelLayout(spec, target)
        if machine.world_size > 1:
            parallelize(model, home, machine.meshes, tp_plan=subject.tp_plan)
        reallocation = Reallocation(
            home, local_tensors(model), copied, rank=machine.rank, world_size=machine.world_size,
            dtype=machine.copy_dtype, device=machine.device, cluster=machine.cluster,
            transport=transport,  # type: ignore[arg-type]
        )  # fmt: skip
        reallocation.run()
        took = min(reallocation.run().seconds for _ in range(REPEATS))
        size = spec.num_elements * machine.copy_dtype.itemsize
        busiest = size / machine.world_size if reallocation.transport == "push" else size
        reallocation.release()
        return busiest, self._agreed([[took]])[0]

    def optimizer(self, subject: Subject) -> Curve:
        """Return seconds to clip and step over a rank's elements, one rank at a time."""
        layout = Layout(ParallelDims(), (0,))
        points = []
        for depth in self._depths(subject):
            model = copy.deepcopy(self._whole(subject, depth)).requires_grad_(True)
            elements = sum(parameter.numel() for parameter in model.parameters())
            took = self._slowest(layout, lambda model=model: [self._optimizer_step(subject, model)])[0]  # type: ignore[misc]
            points.append((float(elements), took))
        return Curve.through(points)

    def _optimizer_step(self, subject: Subject, model: nn.Module) -> Callable[[], object]:
        parameters = list(model.parameters())
        optimizer = subject.new_optimizer(parameters)
        gradients = [torch.full_like(parameter, 1e-3) for parameter in parameters]

        def run() -> None:
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        return run

    # ---- timing
    def _slowest(
        self, layout: Layout, works: Callable[[], Iterable[list[float] | Callable[[], object]]], *, count: int = 1
    ) -> list[float]:
        """Return each work's seconds on the slowest rank of the layout, the fastest of its repeats, on all ranks."""
        machine = self._machine
        times = [[0.0] * REPEATS for _ in range(count)]
        if machine.rank in layout:
            group = machine.meshes.group(layout, *AXES)
            times = [work if isinstance(work, list) else self._repeated(group, work) for work in works()]
        return self._agreed(times)

    def _agreed(self, times: Sequence[Sequence[float]]) -> list[float]:
        """Return the minimum over repeats of the maximum over ranks; sleeps until all ranks are here."""
        table = torch.tensor(times, dtype=torch.float64, device=self._machine.device)
        if self._machine.world_size > 1:
            dist.all_reduce(table, op=dist.ReduceOp.MAX)
        return [min(row) for row in table.tolist()]

    def _repeated(self, group: dist.ProcessGroup | None, work: Callable[[], object]) -> list[float]:
        work()
        return [self._timed(group, work) for _ in range(REPEATS)]

    def _timed(self, group: dist.ProcessGroup | None, work: Callable[[], object]) -> float:
        self._meet(group)
        self._synchronize()
        begin = self._machine.clock()
        work()
        self._synchronize()
        return self._machine.clock() - begin

    def _meet(self, group: dist.ProcessGroup | None) -> None:
        if group is not None:
            dist.all_reduce(torch.zeros(1, device=self._machine.device), group=group)

    def _synchronize(self) -> None:
        if self._machine.device.type == "cuda":
            torch.cuda.synchronize(self._machine.device)


def _pack(size: Size, device: torch.device) -> Callable[[], PackedBatch]:
    """Return what packs equal sequences, as a call does before every forward pass."""
    count = size.sequences
    prompts = torch.full((count, size.prompt), 3)
    responses = torch.full((count, size.response), 4)
    samples = Samples(
        torch.arange(count),
        {
            "prompt_ids": Ragged(prompts.flatten(), torch.full((count,), size.prompt)),
            "response_ids": Ragged(responses.flatten(), torch.full((count,), size.response)),
        },
    )
    return lambda: pack_columns(samples, device)


def _tp(degree: int) -> ParallelDims:
    return ParallelDims(tp=degree)


def _single_axes(dims: ParallelDims) -> list[ParallelDims]:
    """Return the degrees of replicas and of shards, each without other axes."""
    alone = [ParallelDims(dp=dims.dp), ParallelDims(fsdp=dims.fsdp)]
    return [one for one in alone if one.size > 1]


def _without_reduction(kind: PassKind) -> PassKind:
    return "train" if kind == "train_last" else kind


def _all_points(subject: Subject, grid: Grid) -> list[Point]:
    kinds: list[PassKind] = ["infer", "train"] if subject.is_trained else ["infer"]
    points = [Point(kind, size) for kind in kinds for size in (PROBE, *grid.micro_batches)]
    return points + [Point("decode", size) for size in (grid.decoding if subject.decode is not None else ())]


def _probes(subject: Subject, grid: Grid) -> list[Point]:
    kinds: list[PassKind] = ["infer", "train", "train_last"] if subject.is_trained else ["infer"]
    points = [Point(kind, PROBE) for kind in kinds]
    return points + [Point("decode", size) for size in (grid.decoding[:1] if subject.decode is not None else ())]


def _put_on_top(
    base: Readings, dims: ParallelDims, additions: Mapping[ParallelDims, Readings], slowdown: Sequence[float]
) -> Readings:
    """Return the base's passes on more crowded ranks, with what replicas and shards add.

    Under ``tp`` each rank sends a part of the weights, and replicas send what FSDP has left of the gradients.
    """
    crowding = slowdown[dims.size - 1] / slowdown[dims.tp - 1]
    parts = []
    for alone in _single_axes(dims):
        divided = dims.tp * (dims.fsdp if alone.dp > 1 else 1)
        parts.append((additions[alone], slowdown[dims.size - 1] / slowdown[alone.size - 1] / divided))
    readings: dict[Point, tuple[float, float]] = {}
    for (kind, size), known in base.items():
        if kind != "train" and dims.dp > 1:
            continue  # replicas do not meet: what is read for one of them holds
        for one in (kind, "train_last") if kind == "train" else (kind,):
            found = [(_addition_of(readings_of, one), share) for readings_of, share in parts]
            block, rest = (crowding * known[i] + sum(share * added[i] for added, share in found) for i in range(2))
            readings[Point(one, size)] = block, rest
    return readings


def _addition_of(additions: Readings, kind: str) -> tuple[float, float]:
    return next((times for point, times in additions.items() if point.kind == kind), (0.0, 0.0))


def _surfaces(readings: Readings, grid: Grid) -> dict[PassKind, PassTimes]:
    samples: dict[PassKind, list[tuple[float, float, float, float]]] = {}
    for (kind, size), (block, rest) in readings.items():
        if size != PROBE or size in grid.micro_batches:
            sizes = (size.sequences, size.prompt) if kind == "decode" else (size.tokens, size.prompt + size.response)
            samples.setdefault(kind, []).append((*map(float, sizes), block, rest))  # type: ignore[arg-type]
    return {
        kind: PassTimes(
            Surface.through((first, second, block) for first, second, block, _ in points),
            Surface.through((first, second, rest) for first, second, _, rest in points),
        )
        for kind, points in samples.items()
    }
