"""Describe where the weights of a model live: degrees, ranks, regions, parameters.

Pure: uses the standard library only. Start with `Layout` and `ModelLayout`.
"""

from lightning_realloc.layout.cluster import PRESETS, ClusterSpec, NodeLink
from lightning_realloc.layout.cuts import (
    Cut,
    ExpertCut,
    ExpertFsdpCut,
    FsdpCut,
    TensorParallelCut,
    chunk_bounds,
    group_bounds,
    head_bounds,
    sharded,
    sharded_experts,
)
from lightning_realloc.layout.dims import AXES, Coordinate, Layout, ParallelDims, Share, format_ranks, parse_ranks
from lightning_realloc.layout.model import ModelLayout, ModelSpec, ParamSpec
from lightning_realloc.layout.region import Region, tiles
from lightning_realloc.layout.sharding import LocalShard, Piece, local_shard

__all__ = [
    "AXES",
    "PRESETS",
    "ClusterSpec",
    "Coordinate",
    "Cut",
    "ExpertCut",
    "ExpertFsdpCut",
    "FsdpCut",
    "Layout",
    "LocalShard",
    "ModelLayout",
    "ModelSpec",
    "NodeLink",
    "ParallelDims",
    "ParamSpec",
    "Piece",
    "Region",
    "Share",
    "TensorParallelCut",
    "chunk_bounds",
    "format_ranks",
    "group_bounds",
    "head_bounds",
    "local_shard",
    "parse_ranks",
    "sharded",
    "sharded_experts",
    "tiles",
]
