"""Fusion of calls with generation, and the ranks that infer each chunk. Runs without a process group."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_realloc.batch.ragged import Ragged
from lightning_realloc.batch.samples import Samples
from lightning_realloc.batch.training import TrainOptions
from lightning_realloc.layout.dims import Layout
from lightning_realloc.strategies.exchange.routing import CallPlacement, Routes
from lightning_realloc.strategies.exchange.sample_table import ChunkResults, Holders, SampleTable
from tests.strategies.exchange.test_iteration_data import CALLS, GENERATE, INFER, JUDGE, REWARD

APART = {"actor.generate": "dp2@0-1", "critic.infer": "dp1@2", "reward.infer": "dp1@2"}


def _routes(layouts: dict[str, str], num_chunks: int = 2, tokens: int = 20) -> Routes:
    given = {"actor.train": "dp1@0", "critic.train": "dp1@0", **APART, **layouts}
    places = {
        name: CallPlacement(layout=Layout.parse(text), micro_batch_tokens=tokens, train_options=TrainOptions())
        for name, text in given.items()
    }
    return Routes(CALLS, places, 4, num_chunks)


def test_calls_on_other_ranks_than_generation_are_fused_and_come_first() -> None:
    routes = _routes({})
    assert routes.fusion.sources == {"critic.infer": "actor.generate", "reward.infer": "actor.generate"}
    names = [call.name for call in routes.calls]
    assert names == [
        "actor.generate", "critic.infer", "reward.infer", "judge", "estimate", "actor.train", "critic.train"
    ]  # fmt: skip
    assert [len(group) for group in routes.fusion.groups(routes.calls)] == [1, 2, 1, 1, 1, 1]
    assert [len(group) for group in routes.fusion.groups(routes.calls, alone=("critic",))] == [1] * 7
    assert (routes.fusion.num_chunks_of(GENERATE), routes.fusion.users(GENERATE, 2)) == (2, [INFER, REWARD])
    assert routes.fusion.users(GENERATE, 0) == []


def test_calls_on_generating_ranks_or_with_other_inputs_are_not_fused() -> None:
    assert _routes({"critic.infer": "dp2@1-2", "reward.infer": "dp1@0"}).fusion.sources == {}
    assert _routes({}, num_chunks=1).fusion.sources == {}
    needy = replace(REWARD, needs=("rollout", "rewards"))
    calls = (GENERATE, INFER, JUDGE, needy)
    routes = Routes(calls, _routes({}).placements, 4, 2)
    assert routes.fusion.sources == {"critic.infer": "actor.generate"}
    assert [call.name for call in routes.calls] == ["actor.generate", "critic.infer", "judge", "reward.infer"]
    assert routes.fusion.num_chunks_of(GENERATE) == 2
    assert _routes({"critic.infer": "dp1@0", "reward.infer": "dp1@0"}).fusion.num_chunks_of(GENERATE) == 1


def _table(lengths: list[int], owners: list[int], num_chunks: int, holders: Holders | None = None) -> SampleTable:
    responses = Ragged(torch.zeros(sum(lengths), 0), torch.tensor(lengths))
    chunks = [np.flatnonzero(np.array(owners) == chunk) for chunk in range(num_chunks)]
    known = Samples(torch.arange(len(lengths)), {"response_ids": responses})
    return SampleTable(known, holders, chunks=[chunk for chunk in chunks if len(chunk)])


@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(0, 4)), min_size=1, max_size=24),
    st.sampled_from(("dp1@2", "dp2@2-3", "fsdp2@2,3", "tp2@2-3", "pp2@2-3")),
)
def test_every_sample_of_every_chunk_is_inferred_once_by_its_holders(
    samples: list[tuple[int, int]], layout: str
) -> None:
    table = _table([length for length, _ in samples], [chunk for _, chunk in samples], 5)
    routes = _routes({"critic.infer": layout})
    place: Layout = Layout.parse(layout)
    plans = routes.micro_batches(INFER, table)
    counted = sorted(p for plan in plans for micro in plan if micro.counts for p in micro.positions)
    assert counted == list(range(len(samples)))
    if place.dims.fsdp > 1:  # as many collective passes on all ranks
        assert len({len(plan) for plan in plans}) == 1
    holders = routes.holders(INFER, table)
    for index, plan in enumerate(plans):
        for position in (p for micro in plan if micro.counts for p in micro.positions):
            assert holders.shares[position] == index
            assert holders.ranks[index] == routes.placements["critic.infer"].holders[index]
    for micro in (micro for plan in plans for micro in plan):  # no pass mixes chunks or is too long
        assert sum(set(micro.positions) <= set(chunk) for chunk in table.chunks) == 1
        assert sum(samples[p][0] for p in micro.positions) <= 20
    for rank in place.ranks:  # the rows that a rank receives by chunk are those that it infers
        early = {
            chunk[row]
            for chunk in table.chunks
            for row in routes.fusion.chunk_positions(GENERATE, rank, table.lengths[chunk])
        }
        wanted = [call for call in (INFER, REWARD) if rank in routes.placements[call.name].layout]
        assert early == {p for call in wanted for p in routes.positions(call, rank, table)}


def test_seconds_before_the_end_of_generation_are_floats_also_without_work() -> None:
    work = ChunkResults(times=[(1.0, 2.0), (4.0, 6.0), (8.0, 9.0)])
    assert (work.seconds, work.seconds_before(5.0)) == (4.0, 2.0)
    nothing = (ChunkResults().seconds, ChunkResults().seconds_before(5.0))
    assert nothing == (0.0, 0.0)
    assert [type(value) for value in nothing] == [float, float]  # Lightning warns of integers
