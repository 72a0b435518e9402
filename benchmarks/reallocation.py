"""Seconds and bytes of moving 254M parameters between layouts, next to gathering whole parameters.

Four CPU ranks hold the parameters of a Llama (width 1,024, 16 blocks, vocabulary 32,000). fp32 sources become bf16 or
fp32 targets, for every ordered pair of six layouts. A figure is the wall time of the slowest rank, the least of several
turns. A row has fewer turns if time runs out. Arms take turns:

- push, direct: `Reallocation` through shared memory and point to point.
- full: `full_tensor()` of every parameter, cast first, then sliced. Ranks without any part of the source get whole
  parameters by a broadcast, as in trainers with separate generation ranks.
- layer: one all-gather per block, cast first, then sliced; broadcast as above.
- floor: the same bytes by all_to_all_single between ready buffers of at most 128 MB, without packing or casting. The
  bytes that stay on a rank are one flat copy.

Run ``python -m benchmarks.reallocation``.
"""

from __future__ import annotations

import argparse
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from statistics import median
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from benchmarks.harness import BenchmarkReport, make_parser
from benchmarks.ranks import answers_of_ranks, max_over_ranks, turns_within
from lightning_realloc.layout import Layout, ModelLayout, ModelSpec, ParamSpec, TensorParallelCut, sharded
from lightning_realloc.limits import MAX_STAGING_BYTES
from lightning_realloc.realloc.plan import ReallocationPlan
from lightning_realloc.realloc.planner import plan_reallocation
from lightning_realloc.runtime.transfer.executor import Reallocation
from lightning_realloc.runtime.transfer.point_to_point import region_view

WORLD_SIZE = 4
LAYOUTS = ("fsdp4@0-3", "fsdp2.tp2@0-3", "dp2.tp2@0-3", "dp4@0-3", "tp2@2-3", "tp4@0-3")
WIDTH, INNER, BLOCKS, VOCABULARY, KV_WIDTH, HEADS, KV_HEADS = 1024, 2816, 16, 32000, 512, 16, 8
FLOOR_PART_BYTES = 128 << 20

Arm = Callable[[], object]


def llama(num_blocks: int = BLOCKS) -> ModelSpec:
    """Return the parameters of a Llama with untied embeddings: 254M with 16 blocks."""
    columns, rows = TensorParallelCut(0), TensorParallelCut(1)
    query, keys = TensorParallelCut(0, HEADS), TensorParallelCut(0, KV_HEADS, replicate_units=True)
    shapes = {
        "self_attn.q_proj": ((WIDTH, WIDTH), query),
        "self_attn.k_proj": ((KV_WIDTH, WIDTH), keys),
        "self_attn.v_proj": ((KV_WIDTH, WIDTH), keys),
        "self_attn.o_proj": ((WIDTH, WIDTH), TensorParallelCut(1, HEADS)),
        "mlp.gate_proj": ((INNER, WIDTH), columns),
        "mlp.up_proj": ((INNER, WIDTH), columns),
        "mlp.down_proj": ((WIDTH, INNER), rows),
        "input_layernorm": ((WIDTH,), None),
        "post_attention_layernorm": ((WIDTH,), None),
    }
    blocks = [
        ParamSpec(f"model.layers.{block}.{name}.weight", shape, sharded(cut), "block", block)
        for block in range(num_blocks)
        for name, (shape, cut) in shapes.items()
    ]
    embed = ParamSpec("model.embed_tokens.weight", (VOCABULARY, WIDTH), sharded(columns), "input")
    norm = ParamSpec("model.norm.weight", (WIDTH,), sharded(), "output")
    head = ParamSpec("lm_head.weight", (VOCABULARY, WIDTH), sharded(columns), "output")
    return ModelSpec((embed, *blocks, norm, head), num_blocks)


# --- the arms ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Row:
    """Inputs that the arms of one pair of layouts share on this rank."""

    source: ModelLayout
    held: Mapping[str, Tensor]
    mesh: DeviceMesh
    """Mesh of the source, with its axes in the order of the cuts."""
    gathering: dist.ProcessGroup | None
    """Group of ranks that hold one replica of the source with this rank; None outside the source."""
    target: ModelLayout
    wanted: Mapping[str, Tensor]
    """This rank's target tensors, which the gathering arms fill."""
    dtype: torch.dtype

    @property
    def rank(self) -> int:
        """This process's rank."""
        return dist.get_rank()

    @property
    def must_broadcast(self) -> bool:
        """Whether a target rank holds no part of the source."""
        return not set(self.target.layout.ranks) <= set(self.source.layout.ranks)

    def spread(self, full: Tensor) -> None:
        """Broadcast a whole tensor from the source's first rank if any rank needs it."""
        if self.must_broadcast:
            dist.broadcast(full, self.source.layout.ranks[0])

    def take_own(self, name: str, full: Tensor) -> None:
        """Copy this rank's part of a whole parameter into its target tensor."""
        for piece in self.target.pieces(name, self.rank):
            part = region_view(full, piece.region.starts, piece.region.shape)
            region_view(self.wanted[name], piece.offset, piece.region.shape).copy_(part)


def gather_by_full_tensor(row: Row) -> Arm:
    """Return the arm with one `full_tensor()` per parameter, cast first, then sliced."""
    sources = {}
    for param in row.source.model.params:
        if row.rank in row.source.layout:
            stride = torch.empty(param.shape, device="meta").stride()
            sources[param.name] = DTensor.from_local(
                row.held[param.name], row.mesh, _placements(row.source, param), run_check=False,
                shape=torch.Size(param.shape), stride=stride,
            )  # fmt: skip

    def run() -> None:
        for param in row.source.model.params:
            if param.name in sources:
                full = cast(DTensor, sources[param.name].to(row.dtype)).full_tensor()
            else:
                full = torch.empty(param.shape, dtype=row.dtype)
            row.spread(full)
            row.take_own(param.name, full)

    return run


def gather_per_layer(row: Row) -> Arm:
    """Return the arm with one all-gather per block, cast first; whole parameters are assembled and sliced."""
    layers: dict[tuple[str, int | None], list[ParamSpec]] = {}
    for param in row.source.model.params:
        layers.setdefault((param.section, param.block), []).append(param)
    layout = row.source.layout
    members = layout.group(row.rank, "fsdp", "tp") if row.rank in layout else ()

    def gather(params: list[ParamSpec]) -> Tensor:
        whole = torch.empty(sum(param.numel for param in params), dtype=row.dtype)
        if members:
            mine = torch.cat([row.held[param.name].to(row.dtype).flatten() for param in params])
            everyone = mine
            if len(members) > 1:
                everyone = torch.empty(len(members) * mine.numel(), dtype=row.dtype)
                dist.all_gather_into_tensor(everyone, mine, group=row.gathering)
            for member, flat in zip(members, everyone.view(len(members), -1), strict=True):
                _put_together(row.source, params, member, flat, whole)
        return whole

    def run() -> None:
        for params in layers.values():
            whole = gather(params)
            row.spread(whole)
            for param, full in _split(whole, params):
                row.take_own(param.name, full)

    return run


def move_raw(row: Row, plan: ReallocationPlan) -> Arm:
    """Return the arm that moves the plan's bytes between ready buffers, and copies the bytes that stay."""
    sent, received = [0] * WORLD_SIZE, [0] * WORLD_SIZE
    traffic = [route for family in plan.families for route in family.moves()]
    for route, weight in traffic:
        if route.sender == row.rank:
            sent[route.receiver] += route.numel * weight
        if route.receiver == row.rank:
            received[route.sender] += route.numel * weight
    by_rank = plan.bytes_by_rank().values()
    parts = max(1, *(-(-max(one.sent_bytes, one.received_bytes) // FLOOR_PART_BYTES) for one in by_rank))
    sent, received = ([-(-count // parts) for count in counts] for counts in (sent, received))
    outgoing, incoming = (torch.zeros(sum(counts), dtype=row.dtype) for counts in (sent, received))
    num_kept = sum(t.numel for t in plan.share(row.rank).transfers if t.sender == t.receiver)
    largest = max(row.held.values(), key=Tensor.numel).flatten() if row.held else torch.empty(0)
    kept = torch.zeros(num_kept, dtype=row.dtype)

    def run() -> None:
        for _ in range(parts if plan.bytes_moved else 0):
            dist.all_to_all_single(incoming, outgoing, received, sent)
        for start in range(0, num_kept, max(1, largest.numel())):
            part = kept[start : start + largest.numel()]
            part.copy_(largest[: part.numel()])

    return run


def _placements(layout: ModelLayout, param: ParamSpec) -> list[Placement]:
    cuts = {axis: cut.dim for cut in param.cuts for axis in cut.axes}
    dims = (cuts.get(axis) for axis in _mesh_axes(layout.layout))
    return [Replicate() if dim is None else Shard(dim) for dim in dims]


def _put_together(layout: ModelLayout, params: list[ParamSpec], member: int, flat: Tensor, whole: Tensor) -> None:
    at = 0
    for param, full in _split(whole, params):
        shape = layout.local_shape(param.name, member)
        count = int(torch.Size(shape).numel())
        local = flat[at : at + count].view(shape)
        at += count
        for piece in layout.pieces(param.name, member):
            part = region_view(local, piece.offset, piece.region.shape)
            region_view(full, piece.region.starts, piece.region.shape).copy_(part)


def _split(whole: Tensor, params: list[ParamSpec]) -> Iterator[tuple[ParamSpec, Tensor]]:
    at = 0
    for param in params:
        yield param, whole[at : at + param.numel].view(param.shape)
        at += param.numel


# --- one rank ---------------------------------------------------------------------------------------------------------


def work(rank: int, options: argparse.Namespace, answers: Connection) -> None:
    """Measure all pairs on this rank; rank 0 sends the rows."""
    layouts = {text: ModelLayout(llama(options.blocks), Layout.parse(text)) for text in options.layouts}
    meshes = {text: _make_mesh(layout.layout) for text, layout in layouts.items()}
    groups = {text: _make_group(layout.layout, rank) for text, layout in layouts.items()}
    dtype = getattr(torch, options.dtype)
    pairs = [(a, b) for a in layouts for b in layouts if a != b]
    give_up_at = time.monotonic() + options.limit_s
    held: dict[str, Tensor] = {}
    for number, (before, after) in enumerate(pairs):
        if number % (len(layouts) - 1) == 0:
            held.clear()
            held = make_weights(layouts[before], rank)
        budget_s = max(0.0, give_up_at - time.monotonic()) / (len(pairs) - number)
        cells = measure(
            layouts[before], held, meshes[before], groups[before], layouts[after], dtype, budget_s, options.repeats
        )
        if rank == 0:
            answers.send({"source": _short(before), "target": _short(after)} | cells)


def make_weights(layout: ModelLayout, rank: int) -> dict[str, Tensor]:
    """Return random fp32 tensors, equal on ranks that hold the same region."""
    tensors = {}
    for name in layout.names(rank):
        generator = torch.Generator().manual_seed(zlib.crc32(f"{name}{layout.pieces(name, rank)}".encode()))
        tensors[name] = torch.empty(layout.local_shape(name, rank)).uniform_(-1.0, 1.0, generator=generator)
    return tensors


def measure(
    source: ModelLayout,
    held: Mapping[str, Tensor],
    mesh: DeviceMesh,
    gathering: dist.ProcessGroup | None,
    target: ModelLayout,
    dtype: torch.dtype,
    budget_s: float,
    repeats: int,
) -> dict[str, Any]:
    """Return the figures of one row; turns stop before ``budget_s`` is exceeded."""
    start = time.monotonic()
    common: dict[str, Any] = {"rank": dist.get_rank(), "world_size": WORLD_SIZE, "dtype": dtype, "device": "cpu"}
    push, direct = (Reallocation(source, held, target, transport=name, **common) for name in ("push", "direct"))
    reports = [push.run(), direct.run()]
    same = all(torch.equal(push.target_tensors[name], tensor) for name, tensor in direct.target_tensors.items())
    own = {tensor.data_ptr() for tensor in held.values()}
    wanted = {n: torch.empty_like(t) if t.data_ptr() in own else t for n, t in direct.target_tensors.items()}
    row = Row(source, held, mesh, gathering, target, wanted, dtype)
    floor = move_raw(row, plan_reallocation(source, target, element_bytes=dtype.itemsize))
    floor()
    arms: dict[str, Arm] = {"push": push.run, "direct": direct.run, "floor": floor}
    arms |= {"full": gather_by_full_tensor(row), "layer": gather_per_layer(row)}
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for _ in turns_within(repeats, budget_s - (time.monotonic() - start)):
        for name, arm in arms.items():
            seconds[name].append(_time(arm))
    same = same and all(torch.equal(push.target_tensors[name], tensor) for name, tensor in wanted.items())
    least = {name: min(times) for name, times in seconds.items()}
    pushed, sent = reports
    minimal = sent.bytes_moved == sent.bytes_minimum == pushed.bytes_moved
    return {
        "min_mb": round(sent.bytes_minimum / 1e6, 1),
        "moved_mb": round(sent.bytes_moved / 1e6, 1),
        **{f"{name}_s": round(value, 4) for name, value in least.items()},
        "full/push": round(least["full"] / least["push"], 1),
        "full/direct": round(least["full"] / least["direct"], 2),
        "over_floor": round(least["direct"] / least["floor"], 2),
        "extra_mb": round(max_over_ranks(direct.staging_bytes) / 1e6, 1),
        "exact": minimal and max_over_ranks(0.0 if same else 1.0) == 0.0,
        "turns": len(seconds["push"]),
    }


def _time(arm: Arm) -> float:
    """Return the seconds of the slowest rank, from a barrier on."""
    dist.barrier()
    start = time.perf_counter()
    with torch.no_grad():
        arm()
    return max_over_ranks(time.perf_counter() - start)


def _make_mesh(layout: Layout) -> DeviceMesh:
    dims = layout.dims
    ranks = torch.tensor(layout.ranks).view(dims.dp, dims.fsdp, dims.tp).transpose(1, 2)
    axes = _mesh_axes(layout)
    return DeviceMesh("cpu", ranks.reshape([getattr(dims, axis) for axis in axes]), mesh_dim_names=axes)


def _mesh_axes(layout: Layout) -> tuple[str, ...]:
    """Return the axes with more than one rank, in the order in which they cut."""
    return tuple(axis for axis in ("dp", "tp", "fsdp") if getattr(layout.dims, axis) > 1)


def _short(layout: str) -> str:
    return layout.removesuffix(f"@0-{WORLD_SIZE - 1}")


def _make_group(layout: Layout, rank: int) -> dist.ProcessGroup | None:
    mine = None
    for ranks in layout.groups("fsdp", "tp"):
        group = dist.new_group(list(ranks))
        mine = group if rank in ranks else mine
    return mine


# --- main -------------------------------------------------------------------------------------------------------------


def main() -> int:
    """Start the ranks, print each row as it arrives, and then the table."""
    options = _parse()
    report = BenchmarkReport(
        "reallocation",
        settings={"dtype": options.dtype, "parameters": llama(options.blocks).num_elements, "repeats": options.repeats},
    )
    for cells in answers_of_ranks(work, options, world_size=WORLD_SIZE):
        report.add_row(**cells)
        sys.stderr.write(f"{len(report.rows)}: {cells}\n")
    _judge(report, options.dtype)
    return report.finish(options)


def _judge(report: BenchmarkReport, dtype: str) -> None:
    rows = report.rows
    inexact = sum(not row["exact"] for row in rows)
    report.require_at_most("rows where moved bytes are not the minimum or bits differ", inexact, 0)
    if dtype == "bfloat16":
        over_push = median(row["full/push"] for row in rows)
        report.require_at_least("full_tensor seconds / push seconds, median", over_push, 20)
    over_direct = median(row["full/direct"] for row in rows)
    report.require_at_least("full_tensor seconds / direct seconds, median", over_direct, 4)
    report.require_at_most("direct seconds / floor seconds, median", median(row["over_floor"] for row in rows), 1.8)
    bucket_mb = 2 * MAX_STAGING_BYTES / 1e6
    report.require_at_most("extra memory of a rank, MB, one bucket", max(row["extra_mb"] for row in rows), bucket_mb)


def _parse() -> argparse.Namespace:
    parser = make_parser(__doc__ or "")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="dtype of the target")
    parser.add_argument("--repeats", type=int, default=5, help="turns of each arm; the fastest one counts")
    parser.add_argument("--blocks", type=int, default=BLOCKS, help="blocks of the model; fewer for a quick look")
    parser.add_argument("--layouts", nargs="+", default=LAYOUTS, metavar="LAYOUT", help="all ordered pairs of these")
    parser.add_argument(
        "--limit-s", type=float, default=780.0, help="approximate seconds of the run; rows take fewer turns to keep it"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
