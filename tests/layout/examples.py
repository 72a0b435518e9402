"""Models and layouts for the pure tests: strategies that draw small ones, and the shapes of known large ones."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st

from lightning_realloc.layout import (
    ClusterSpec,
    Cut,
    FsdpCut,
    Layout,
    ModelLayout,
    ModelSpec,
    ParallelDims,
    ParamSpec,
    TensorParallelCut,
    sharded,
    sharded_experts,
)
from lightning_realloc.layout.cuts import ExpertCut, Intervals, share_bounds

WORLD_SIZE = 8


@dataclass(frozen=True, slots=True)
class JointCut(Cut):
    """A kind of cut that the package does not have: whole rows over the ranks of two axes together."""

    axes = (*FsdpCut.axes, *TensorParallelCut.axes)

    def refusal(self, shape: tuple[int, ...], count: int) -> str | None:
        """Refuse more ranks than rows."""
        return None if count <= shape[self.dim] else f"{count} ranks exceed the rows ({shape[self.dim]})"

    def split(self, held: Intervals, count: int, index: int) -> Intervals:
        """Return even shares."""
        ((_, size),) = held
        return (share_bounds(size, count, index),)


def llama_spec(*, width: int, inner: int, layers: int, vocab: int, heads: int, kv_heads: int) -> ModelSpec:
    """Return the parameters of a Llama with the cuts of its tensor-parallel plan."""
    head = width // heads
    query, output = (TensorParallelCut(dim, heads, num_groups=kv_heads) for dim in (0, 1))
    rows = TensorParallelCut(0)
    key_value = TensorParallelCut(0, kv_heads, replicate_units=True)
    shapes: list[tuple[str, tuple[int, ...], TensorParallelCut | None]] = [
        ("self_attn.q_proj.weight", (width, width), query),
        ("self_attn.k_proj.weight", (kv_heads * head, width), key_value),
        ("self_attn.v_proj.weight", (kv_heads * head, width), key_value),
        ("self_attn.o_proj.weight", (width, width), output),
        ("mlp.gate_proj.weight", (inner, width), rows),
        ("mlp.up_proj.weight", (inner, width), rows),
        ("mlp.down_proj.weight", (width, inner), TensorParallelCut(1)),
        ("input_layernorm.weight", (width,), None),
        ("post_attention_layernorm.weight", (width,), None),
    ]
    params = [ParamSpec("model.embed_tokens.weight", (vocab, width), sharded(rows), "input")]
    for block in range(layers):
        params += [
            ParamSpec(f"model.layers.{block}.{name}", shape, sharded(cut), block=block) for name, shape, cut in shapes
        ]
    params.append(ParamSpec("model.norm.weight", (width,), section="output"))
    params.append(ParamSpec("lm_head.weight", (vocab, width), sharded(rows), "output"))
    return ModelSpec(tuple(params), layers, attention_heads=((heads, kv_heads),))


def experts_spec(*, width: int, inner: int, layers: int, experts: int) -> ModelSpec:
    """Return the parameters of a mixture of experts, with the router and one dense weight in each block."""
    shapes = [
        ("gate.weight", (experts, width), sharded()),
        ("experts.gate_up_proj", (experts, 2 * inner, width), sharded_experts()),
        ("experts.down_proj", (experts, width, inner), sharded_experts()),
        ("self_attn.o_proj.weight", (width, width), sharded()),
    ]
    params = [
        ParamSpec(f"model.layers.{block}.{name}", shape, cuts, block=block)
        for block in range(layers)
        for name, shape, cuts in shapes
    ]
    return ModelSpec(tuple(params), layers, ep_refusal=None)


LLAMA_7B = llama_spec(width=4096, inner=11008, layers=32, vocab=32000, heads=32, kv_heads=32)
LLAMA_70B = llama_spec(width=8192, inner=28672, layers=80, vocab=32000, heads=64, kv_heads=8)
EXPERTS = experts_spec(width=12, inner=10, layers=2, experts=4)
SMALL = llama_spec(width=12, inner=18, layers=2, vocab=13, heads=4, kv_heads=2)


@st.composite
def cut_params(draw: st.DrawFn, name: str, section: str, block: int | None) -> ParamSpec:
    """Draw a parameter of one to three small dims with any kind of cut."""
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    dim = draw(st.integers(0, len(shape) - 1))
    kind = draw(st.sampled_from(["fsdp", "chunk", "heads", "kv", "fused", "fused_heads", "joint", "experts", "factor"]))
    if kind == "fsdp":
        return ParamSpec(name, tuple(shape), (FsdpCut(dim),), section, block)  # type: ignore[arg-type]
    if kind == "joint":
        return ParamSpec(name, (draw(st.integers(1, 8)), *shape), (JointCut(0),), section, block)  # type: ignore[arg-type]
    if kind == "experts":
        cut = draw(st.sampled_from([None, TensorParallelCut(1)]))
        return ParamSpec(name, (draw(st.sampled_from([3, 4, 6, 8])), *shape), sharded_experts(cut), section, block)  # type: ignore[arg-type]
    if kind == "factor":  # the second one of experts' adapters, of gate and up
        rank, features = draw(st.integers(1, 3)), draw(st.integers(1, 4))
        cut = draw(st.sampled_from([None, TensorParallelCut(0, block_sizes=(features, features))]))
        cuts = sharded_experts(cut, by_expert=ExpertCut(1, num_blocks=rank))
        return ParamSpec(name, (2 * features, rank * draw(st.sampled_from([3, 4, 6, 8]))), cuts, section, block)  # type: ignore[arg-type]
    cut = None
    if kind == "chunk":
        shape[dim] = draw(st.integers(1, 9))
        cut = TensorParallelCut(dim)
    elif kind == "heads":
        units, groups = draw(st.sampled_from([(4, None), (5, None), (4, 2), (6, 2), (9, 3), (4, 1)]))
        shape[dim] = units * draw(st.integers(1, 3))
        cut = TensorParallelCut(dim, units, num_groups=groups)
    elif kind == "kv":
        units = draw(st.integers(1, 5))
        shape[dim] = units * draw(st.integers(1, 3))
        cut = TensorParallelCut(dim, units, replicate_units=True)
    elif kind == "fused":
        blocks = tuple(draw(st.lists(st.integers(1, 6), min_size=2, max_size=3)))
        shape[dim] = sum(blocks)
        cut = TensorParallelCut(dim, block_sizes=blocks)
    elif kind == "fused_heads":  # q|k|v with four query heads and one or two key and value heads each
        head, groups = draw(st.integers(1, 2)), draw(st.integers(1, 2))
        units = (4, groups, groups)
        shape[dim] = sum(units) * head
        blocks = tuple(count * head for count in units)
        cut = TensorParallelCut(dim, sum(units), replicate_units=True, block_sizes=blocks, num_groups=groups)
    return ParamSpec(name, tuple(shape), sharded(cut), section, block)  # type: ignore[arg-type]


@st.composite
def models(draw: st.DrawFn) -> ModelSpec:
    """Draw two to four blocks of one or two parameters, with a parameter before and after them."""
    num_blocks = draw(st.integers(2, 4))
    params = [draw(cut_params("embed", draw(st.sampled_from(["input", "ends"])), None))]
    block_params = [draw(cut_params("w", "block", 0)) for _ in range(draw(st.integers(1, 2)))]
    for block in range(num_blocks):
        params += [
            ParamSpec(f"layers.{block}.{index}", param.shape, param.cuts, block=block)
            for index, param in enumerate(block_params)
        ]
    params.append(draw(cut_params("head", "output", None)))
    costs = draw(st.sampled_from([(), (0, *range(1, num_blocks + 1), 2)]))
    return ModelSpec(tuple(params), num_blocks, ep_refusal=None, costs=costs)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Draw degrees, of which models with fused heads refuse tp=3, over any ordered ranks below ``WORLD_SIZE``."""
    options = [
        ParallelDims(pp=pp, vpp=vpp, dp=dp, fsdp=fsdp, cp=cp, tp=tp, ep=ep)
        for pp, vpp in ((1, 1), (2, 1), (2, 2))
        for dp in (1, 2, 3)
        for fsdp in (1, 2, 3, 4)
        for cp in (1, 2)
        for tp in (1, 2, 3, 4)
        if pp * dp * fsdp * cp * tp <= WORLD_SIZE
        for ep in ParallelDims(dp=dp, fsdp=fsdp).expert_degrees
    ]
    dims = draw(st.sampled_from(options))
    ranks = draw(st.permutations(range(WORLD_SIZE)))
    return Layout(dims, tuple(ranks[: dims.size]))


@st.composite
def layout_pairs(draw: st.DrawFn) -> tuple[ModelLayout, ModelLayout]:
    """Draw one model under two layouts."""
    model = draw(models())
    fitting = layouts().filter(lambda layout: allows(model, layout))
    return ModelLayout(model, draw(fitting)), ModelLayout(model, draw(fitting))


def allows(model: ModelSpec, layout: Layout) -> bool:
    """Return whether the ranks of a layout can divide every parameter, and its stages the blocks."""
    if layout.dims.num_runs > max(1, model.num_blocks):
        return False
    kinds = {cut.axes for param in model.params for cut in param.cuts}
    return all(layout.count(*axes) in model.allowed_counts(axes, WORLD_SIZE) for axes in kinds)


clusters = st.sampled_from([None, *(ClusterSpec.parse(f"h100:{text}") for text in ("1x8", "2x4", "4x2", "8x1"))])
