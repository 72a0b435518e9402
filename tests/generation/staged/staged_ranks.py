"""Generate from pipeline stages on the ranks of a worker pool."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from lightning_realloc.generation import Completion, Turn
from lightning_realloc.generation.loop.run import GenerationStats
from lightning_realloc.generation.rebalance.handover import MigrationStats
from lightning_realloc.generation.rebalance.peers import Peers
from lightning_realloc.generation.speculative.draft_model import ModelDrafter
from lightning_realloc.generation.staged.staged_engine import StagedEngine
from lightning_realloc.layout import Layout, ModelLayout
from lightning_realloc.runtime.messages.mailbox import Mailbox
from lightning_realloc.runtime.parallel.mesh import MeshRegistry
from lightning_realloc.runtime.parallel.model_spec import describe_model
from lightning_realloc.runtime.parallel.parallelize import parallelize
from lightning_realloc.runtime.parallel.pipeline import PipelineStage
from lightning_realloc.runtime.parallel.stage_link import StageLink
from lightning_realloc.strategies.calls.engine_factory import agreement
from lightning_realloc.strategies.calls.lockstep import Lockstep
from tests.generation.random_moves import at_random, moving
from tests.models import tiny_model


class Made(NamedTuple):
    """Result of one call on a last stage."""

    completions: list[Completion]
    stats: GenerationStats
    moves: MigrationStats | None


LAYERS = {"num_hidden_layers": 4}


def staged_engine(family: str, layout: Layout, meshes: MeshRegistry, **options: Any) -> StagedEngine:
    """Return this rank's engine of a tiny model with four layers.

    It may draft by a whole copy of the model (``drafts_by_itself``), and move samples (``moves``: those that may).
    """
    model = tiny_model(family, **LAYERS)
    model_layout = ModelLayout(describe_model(model), layout)
    model = parallelize(model, model_layout, meshes)
    host = meshes.new_host_group()
    assert host is not None
    device = torch.device("cpu")
    batch_group = meshes.batch_group(layout) if layout.is_sharded else None
    stage = PipelineStage(model, model_layout, meshes)
    if options.pop("drafts_by_itself", False) and stage.is_last:
        options["drafter"] = ModelDrafter(tiny_model(family, **LAYERS), model)
    if moves := options.pop("moves", None):
        rank, peers = dist.get_rank(), layout.batch_group(dist.get_rank())
        mailbox = Mailbox(rank, dist.get_world_size(), host)
        options["peers"] = Peers(mailbox, rank, tuple(set(peers) - {rank}), moves) if stage.is_last else None
    return StagedEngine(
        model,
        StageLink(stage, host),
        lockstep=None if batch_group is None else Lockstep(batch_group, device),
        agree=agreement(meshes.tensor_group(layout), device),
        **options,
    )


def own_prompts(layout: Layout, prompts: Sequence[list[int]]) -> tuple[list[list[int]], list[int]]:
    """Return the prompts of this rank's data-parallel share, in turn, and their places."""
    index, size = layout.data_parallel_index(dist.get_rank()), layout.data_parallel_size
    places = [place for place in range(len(prompts)) if place % size == index]
    return [prompts[place] for place in places], places


async def answer_in_words(turn: Turn) -> list[int] | None:
    """Answer two turns with two tokens, which depend on all tokens so far."""
    if turn.number > 2:
        return None
    await asyncio.sleep(0.002 * (turn.sample_id % 3))
    return [3 + sum(turn.token_ids) % 90, 7]


def generate_staged(
    family: str, texts: Sequence[str], prompts: Sequence[list[int]], arguments: dict[str, Any], options: dict[str, Any]
) -> list[Made | None]:
    """Return what this rank makes under each layout in the second of two equal calls; None on other stages.

    Sample ids are those of one rank with all prompts.
    """
    layouts = [Layout.parse(text) for text in texts]
    meshes = MeshRegistry("cpu")
    meshes.create(layouts)
    n = arguments["params"].n
    made: list[Made | None] = []
    for layout in layouts:
        if dist.get_rank() not in layout:
            meshes.new_host_group()
            made.append(None)
            continue
        engine = staged_engine(family, layout, meshes, **dict(options))
        if engine.is_follower:
            assert engine.follow() and engine.follow()
            made.append(None)
            continue
        mine, places = own_prompts(layout, prompts)
        ids = [n * place + k for place in places for k in range(n)]
        with moving(every=3, plan_balance=at_random):
            for _ in range(2):
                completions = engine.generate(mine, sample_ids=ids, **arguments)
                engine.leave()
        made.append(Made(completions, engine.stats, engine.migration_stats))
    return made
