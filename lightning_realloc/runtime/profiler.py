"""How long does a model's pass take on the ranks that are here, block by block? Measured, in seconds not minutes.

A model of one block and one of a few more run through the same code as the real one; their difference is a block, what
is left is everything else. Ranks outside a layout wait meanwhile, asleep: nobody is in the way of what is measured.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
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
LONG_S = 0.1
"""A run that takes longer says enough alone."""
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


PROBE, DECODE_PROBE = Size(1, 8, 8), Size(1, 8, 0)
"""A pass, and a decoding step, that compute next to nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Where passes are measured."""

    micro_batches: tuple[Size, ...]
    decoding: tuple[Size, ...] = ()
    """Decoding steps of sequences with prompts as long as their context."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
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
    decode: Callable[[nn.Module, dist.ProcessGroup | None, Size, int], Sequence[float]] | None = None
    """(model, group that steps together, sequences and context, number) -> seconds of decoding steps; None: it does
    not decode."""
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
    """Measures passes, the slowdown of crowded nodes, and reallocations. All methods are collective over all ranks.

    Args:
        seconds: After which no more degrees are measured; what is needed of every model is measured all the same.
    """

    def __init__(self, machine: Machine, *, seconds: float = math.inf) -> None:
        self._machine = machine
        self._wholes: dict[tuple[str, int], nn.Module] = {}
        self._bases: dict[tuple[str, int], Readings] = {}
        self._additions: dict[tuple[str, ParallelDims], Readings] = {}
        self._seconds, self._begin, self._elapsed_s = seconds, machine.clock(), 0.0

    def passes(
        self, wanted: Mapping[Subject, Sequence[ParallelDims]], grid: Grid, *, slowdown: Sequence[float]
    ) -> dict[PassKey, PassTimes]:
        """Return how long models' passes take under some degrees, on the first ranks, all others waiting.

        Tensor parallelism divides what is computed, and is measured at every size. What sharding and replicas add are
        weights and gradients on their way, the same for every size: each degree of each of the two is measured at the
        smallest size, without the other axes, and put on top of what tensor parallelism takes. Degrees that fill the
        node come first; what the time does not suffice for is left out.
        """
        tasks: list[tuple[int, int, Callable[[], None]]] = []  # later, larger degrees first
        for number, (subject, dims) in enumerate(wanted.items()):
            self._measure_base(subject, 1, grid)
            for tp in {one.tp for one in dims if one.tp > 1}:
                tasks.append((-tp, number, partial(self._measure_base, subject, tp, grid)))
            if subject.like is None:
                for one in {alone for each in dims for alone in _single_axes(each)}:
                    tasks.append((-one.size, number, partial(self._measure_addition, subject, one, slowdown)))
        for _, _, task in sorted(tasks, key=lambda task: task[:2]):
            if not self._is_late:
                task()
        return {
            PassKey(subject.key, kind, one): times
            for subject, dims in wanted.items() for one in dims
            for kind, times in self._assembled(subject, one, grid, slowdown).items()
        }  # fmt: skip

    @property
    def _is_late(self) -> bool:
        """Whether the time is over, on every rank alike."""
        return self._elapsed_s >= self._seconds

    def _assembled(
        self, subject: Subject, dims: ParallelDims, grid: Grid, slowdown: Sequence[float]
    ) -> dict[PassKind, PassTimes]:
        """Return what is known under some degrees; nothing where a part of them was not measured."""
        base = self._bases.get((subject.key, dims.tp))
        parts = [self._additions.get((subject.like or subject.key, alone)) for alone in _single_axes(dims)]
        if base is None or None in parts:
            return {}
        added = dict(zip(_single_axes(dims), parts, strict=True))
        return _surfaces(_put_on_top(base, dims, added, slowdown), grid)  # type: ignore[arg-type]

    def _measure_base(self, subject: Subject, tp: int, grid: Grid) -> None:
        """Time what tensor parallelism takes; of blocks like another subject's, only the rest."""
        layout, points = Layout(_tp(tp), tuple(range(tp))), _all_points(subject, grid)
        self._machine.meshes.create([layout])
        known = self._bases.get((subject.like or "", tp))
        if known is None:
            self._bases[subject.key, tp] = self._read(subject, layout, points)
            return
        whole = self._slowest(layout, lambda: self._works(subject, 1, layout, points), count=len(points))
        self._bases[subject.key, tp] = {
            point: (known[point][0], max(0.0, seconds - known[point][0]))
            for point, seconds in zip(points, whole, strict=True)
        }

    def _measure_addition(self, subject: Subject, dims: ParallelDims, slowdown: Sequence[float]) -> None:
        """Time what one axis adds to the base, to a block and to the rest; less than nothing is noise."""
        layout = Layout(dims, tuple(range(dims.size)))
        self._machine.meshes.create([layout])
        probes = [point for point in _probes(subject) if dims.dp == 1 or point.kind.startswith("train")]
        base, crowding = self._bases[subject.key, 1], slowdown[dims.size - 1]
        added = {}
        for point, (block, rest) in self._read(subject, layout, probes).items():
            without = base[Point(_without_reduction(point.kind), point.size)]
            added[point] = max(0.0, block - crowding * without[0]), max(0.0, rest - crowding * without[1])
        self._additions[subject.key, dims] = added

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
        num_steps = DECODE_STEPS if layout.dims.fsdp == 1 else 2  # sharded ones are long
        seconds = subject.decode(model, meshes.group(layout, "fsdp"), size, num_steps)
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
        elapsed = self._machine.clock() - self._begin
        table = torch.tensor([*times, [elapsed] * len(times[0])], dtype=torch.float64, device=self._machine.device)
        if self._machine.world_size > 1:
            dist.all_reduce(table, op=dist.ReduceOp.MAX)
        *seconds, self._elapsed_s = (min(row) for row in table.tolist())
        return seconds

    def _repeated(self, group: dist.ProcessGroup | None, work: Callable[[], object]) -> list[float]:
        """Return the seconds of some runs after one that warms up; of one alone where that was long enough."""
        first = self._timed(group, work)
        repeats = REPEATS if self._meet(group, first) < LONG_S else 1
        times = [self._timed(group, work) for _ in range(repeats)]
        return times + [times[-1]] * (REPEATS - repeats)

    def _timed(self, group: dist.ProcessGroup | None, work: Callable[[], object]) -> float:
        self._meet(group)
        self._synchronize()
        begin = self._machine.clock()
        work()
        self._synchronize()
        return self._machine.clock() - begin

    def _meet(self, group: dist.ProcessGroup | None, value: float = 0.0) -> float:
        """Wait for the group's ranks; return the largest of their values."""
        largest = torch.tensor([value], device=self._machine.device)
        if group is not None:
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        return float(largest)

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
    decoded = (DECODE_PROBE, *grid.decoding) if subject.decode is not None else ()
    kinds: list[PassKind] = ["infer", "train"] if subject.is_trained else ["infer"]
    points = [Point(kind, size) for kind in kinds for size in (PROBE, *grid.micro_batches)]
    return points + [Point("decode", size) for size in decoded]


def _probes(subject: Subject) -> list[Point]:
    kinds: list[PassKind] = ["infer", "train", "train_last"] if subject.is_trained else ["infer"]
    points = [Point(kind, PROBE) for kind in kinds]
    return [*points, Point("decode", DECODE_PROBE)] if subject.decode is not None else points


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
        if size in (grid.decoding if kind == "decode" else grid.micro_batches):
            sizes = (size.sequences, size.prompt) if kind == "decode" else (size.tokens, size.prompt + size.response)
            samples.setdefault(kind, []).append((*map(float, sizes), block, rest))  # type: ignore[arg-type]
    return {
        kind: PassTimes(
            Surface.through((first, second, block) for first, second, block, _ in points),
            Surface.through((first, second, rest) for first, second, _, rest in points),
        )
        for kind, points in samples.items()
    }
