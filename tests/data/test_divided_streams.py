"""Ranks divide the shards of a stream: every row once, one order for any number of ranks, cheap resumption."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from typing import Any

import pytest
import torch
import torch.distributed as dist
from datasets import IterableDataset, concatenate_datasets, interleave_datasets
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_realloc.batch.ragged import Ragged
from lightning_realloc.batch.samples import Samples
from lightning_realloc.data.prompts import PromptDataModule
from lightning_realloc.data.rows import Row
from lightning_realloc.data.streams.row_streams import MAX_PARTS, RowStream
from lightning_realloc.data.streams.stream_loader import StreamLoader
from lightning_realloc.errors import CheckpointError, DataError
from lightning_realloc.runtime.messages.objects import gather_objects
from lightning_realloc.strategies import ReallocStrategy
from tests.matrices import matrix
from tests.models import byte_tokenizer, tiny_model
from tests.strategies import runs
from tests.workers import WorkerPool

Drawn = list[list[tuple[int, int]]]
"""Ids and rows, batch by batch."""


def stream(shards: Sequence[int], read: Counter[int] | None = None, *, fails_at: int | None = None) -> IterableDataset:
    """Return a data set of numbers, with a shard of each given size; ``read`` counts the rows that are read."""

    def rows(shards: list[tuple[int, int]]) -> Iterator[dict[str, int]]:
        for begin, size in shards:
            for number in range(begin, begin + size):
                if number == fails_at:
                    raise ConnectionError("the line is dead")
                if read is not None:
                    read[number] += 1
                yield {"at": number}

    begins = [sum(shards[:index]) for index in range(len(shards))]
    return IterableDataset.from_generator(rows, gen_kwargs={"shards": list(zip(begins, shards, strict=True))})


def tabulate(rows: Sequence[Row]) -> Samples:
    numbers = [row.values["at"] for row in rows]
    columns = {"at": tuple(numbers), "prompt_ids": Ragged.from_list([[number] for number in numbers])}
    return Samples(torch.arange(len(numbers)), columns)


def loader(table: IterableDataset, *, rank: int = 0, num_ranks: int = 1, **options: Any) -> StreamLoader:
    return StreamLoader(RowStream("numbers", table), tabulate, rank=rank, num_ranks=num_ranks, **options)


def drawn(loader: StreamLoader, count: int) -> Drawn:
    """Return the next batches; the loader goes on behind them."""
    batches = [list(zip(batch.ids.tolist(), batch["at"], strict=True)) for batch in islice(loader, count)]
    return batches  # type: ignore[return-value]


ORDERS = st.fixed_dictionaries(
    {"batch_size": st.integers(1, 7), "shuffle_buffer": st.integers(1, 20), "seed": st.integers(0, 3)}
)
SHARDS = st.lists(st.integers(0, 9), min_size=1, max_size=2 * MAX_PARTS).filter(lambda sizes: sum(sizes) >= 8)


@settings(max_examples=10, deadline=None)
@given(SHARDS, ORDERS, st.integers(0, 12), st.booleans())
def test_a_stream_of_shards_holds_every_row_once_and_resumes(
    shards: list[int], order: dict[str, Any], stop: int, reads_ahead: bool
) -> None:
    num_batches = -(-sum(shards) // order["batch_size"])
    stop = min(stop, num_batches + 4)
    begun = loader(stream(shards), reads_ahead=reads_ahead, **order)
    whole = drawn(begun, num_batches + 4)
    seen = [at for _, at in chain(*whole[:num_batches])]
    assert sorted(seen) == list(range(sum(shards)))
    ids = [one for one, _ in chain(*whole)]
    assert len(set(ids)) == len(ids)
    assert drawn(loader(stream(shards), **order), num_batches + 4) == whole

    first, resumed = (loader(stream(shards), **order) for _ in range(2))
    drawn(first, stop)
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert drawn(resumed, num_batches + 4 - stop) == whole[stop:]
    first.close()
    assert drawn(first, num_batches + 4 - stop) == whole[stop:]


@pytest.mark.parametrize("shuffle", [False, True])
def test_the_rows_read_to_resume_do_not_grow_with_the_position(shuffle: bool) -> None:
    """`datasets` skips whole shards, and reads each part's current one from its beginning."""
    shards = [4] * 100
    order = {"batch_size": 5, "shuffle_buffer": 16, "shuffle": shuffle, "reads_ahead": False}
    costs = []
    for stop in (1, 30, 75):
        begun = loader(stream(shards), **order)
        drawn(begun, stop)
        read: Counter[int] = Counter()
        resumed = loader(stream(shards, read), **order)
        resumed.load_state_dict(begun.state_dict())
        drawn(resumed, 1)
        costs.append(read.total())
    parts = MAX_PARTS if shuffle else 1
    assert max(costs) <= parts * 4 + 16, "the rest of a shard for each part, and a block"


def test_a_shuffled_data_set_is_resumed_by_reading_forward() -> None:
    """Its buffer is no part of its state, which would lose rows."""
    read: Counter[int] = Counter()
    order = {"batch_size": 5, "shuffle_buffer": 8, "reads_ahead": False}
    whole = drawn(loader(stream([20] * 4).shuffle(seed=3, buffer_size=10), **order), 20)
    assert sorted(at for _, at in chain(*whole[:16])) == list(range(80))
    begun = loader(stream([20] * 4).shuffle(seed=3, buffer_size=10), **order)
    drawn(begun, 12)
    resumed = loader(stream([20] * 4, read).shuffle(seed=3, buffer_size=10), **order)
    resumed.load_state_dict(begun.state_dict())
    assert drawn(resumed, 8) == whole[12:]
    assert read.total() > 60


def _numbered(row: dict[str, int], index: int) -> dict[str, int]:
    return {"at": 100 * row["at"] + index}


def _every_second(rows: dict[str, list[int]]) -> dict[str, list[int]]:
    return {"at": rows["at"][::2]}


def _interleaved(strategy: str, **options: Any) -> IterableDataset:
    sources = [stream([9] * 4), stream([5, 1, 4, 3])]
    return interleave_datasets(sources, stopping_strategy=strategy, **options)  # type: ignore[arg-type]


CHAINS: dict[str, tuple[Callable[[IterableDataset], IterableDataset], int]] = {
    "skip": (lambda table: table.skip(10), 1),
    "take": (lambda table: table.take(10), 1),
    "skip a shuffled one": (lambda table: table.shuffle(seed=1, buffer_size=5).skip(10), 1),
    "shuffle a skipped one": (lambda table: table.skip(10).shuffle(seed=1, buffer_size=5), 1),
    "skip, then add": (lambda table: concatenate_datasets([table.skip(10), stream([3] * 4)]), 1),
    "skip a mixture": (lambda table: _interleaved("all_exhausted", probabilities=[0.7, 0.3], seed=1).skip(10), 1),
    "skip one shard": (lambda table: concatenate_datasets([stream([9]).skip(5), stream([5]).take(2)]), 2),
    "first ended": (lambda table: _interleaved("first_exhausted"), 1),
    "all ended": (lambda table: _interleaved("all_exhausted"), 1),
    "each row once": (lambda table: _interleaved("all_exhausted_without_replacement"), 4),
    "numbered": (lambda table: table.map(_numbered, with_indices=True), 1),
    "filter by number": (lambda table: table.filter(lambda _, index: index % 7 > 0, with_indices=True), 1),
    "whole batches": (lambda table: table.map(dict, batched=True, batch_size=7, drop_last_batch=True), 1),
    "one batch": (lambda table: table.map(_every_second, batched=True, batch_size=None), 1),
    "map": (lambda table: table.map(dict, batched=True, batch_size=7).filter(lambda row: row["at"] % 7 > 0), 4),
    "repeat": (lambda table: table.repeat(2), 4),
}  # fmt: skip


@pytest.mark.parametrize("chain_name", CHAINS)
def test_the_parts_of_a_stream_hold_the_rows_that_the_stream_has(chain_name: str) -> None:
    """Of many shards, `datasets` skips, takes, numbers and ends in each one, which selects other rows."""
    made, num_parts = CHAINS[chain_name]
    rows = [row["at"] for row in made(stream([9] * 4))]
    num_batches, order = -(-len(rows) // 4), {"batch_size": 4, "shuffle_buffer": 6}
    begun = loader(made(stream([9] * 4)), **order)
    whole = drawn(begun, 2 * num_batches)
    assert begun.num_parts == num_parts
    for batches in (whole[:num_batches], whole[num_batches:]):  # in the second epoch, too
        assert sorted(at for _, at in chain(*batches)) == sorted(rows)
    for stop in (3, num_batches + 2):
        first, resumed = (loader(made(stream([9] * 4)), **order) for _ in range(2))
        drawn(first, stop)
        resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert drawn(resumed, 2 * num_batches - stop) == whole[stop:]


def test_without_shuffling_every_epoch_has_the_order_of_the_stream() -> None:
    """`datasets` reorders shards in its later epochs, even if nobody called shuffle()."""
    rows = list(range(20))
    begun = loader(stream([5] * 4), batch_size=4, shuffle=False)
    assert [at for _, at in chain(*drawn(begun, 15))] == rows * 3
    shuffled = loader(stream([5] * 4).shuffle(seed=1, buffer_size=4), batch_size=4, shuffle=False)
    first, second = ([at for _, at in chain(*drawn(shuffled, 5))] for _ in range(2))
    assert sorted(first) == sorted(second) == rows and first != second


def test_a_position_of_another_number_of_parts_is_refused() -> None:
    options = {"batch_size": 5}
    state = loader(stream([9] * 3), **options).state_dict()
    with pytest.raises(CheckpointError, match="was written with 3 parts, and the stream now has 2: give"):
        loader(stream([9] * 2), **options).load_state_dict(state)
    earlier = {name: value for name, value in state.items() if name != "num_parts"}
    with pytest.raises(CheckpointError, match="was written with 1 parts, and the stream now has 3: give"):
        loader(stream([9] * 3), **options).load_state_dict(earlier)
    del earlier["place"]["marks"]
    begun = loader(stream([30]), batch_size=5, shuffle_buffer=8, shuffle=True)
    whole = drawn(begun, 6)
    earlier = {**earlier, "block_rows": 8, "place": {"epoch": 0, "block": 8, "position": 2, "num_before": 8}}
    resumed = loader(stream([30]), batch_size=5, shuffle_buffer=8, shuffle=True)
    resumed.load_state_dict(earlier)
    assert drawn(resumed, 4) == whole[2:]


# ---- several ranks
def read_on_ranks(shards: list[int], stop: int) -> tuple[Drawn, Drawn, Drawn, list[int]]:
    """Return the batches at once, and before and after a resumption, and the rows that this rank read for the first."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    read: Counter[int] = Counter()
    order = {"batch_size": 5, "shuffle_buffer": 16, "seed": 2, "rank": rank, "num_ranks": num_ranks}
    whole = drawn(loader(stream(shards, read), reads_ahead=False, **order), 20)
    first, resumed = (loader(stream(shards), **order) for _ in range(2))
    begun = drawn(first, stop)
    first.close()
    states = gather_objects(first.state_dict())
    assert all(state == states[0] for state in states), "every rank can write the checkpoint"
    resumed.load_state_dict(states[0])
    return whole, begun, drawn(resumed, 20 - stop), sorted(read.elements())


@pytest.mark.parametrize("shards", [[10] * 10, [3, 40, 0, 7, 50], [100]])
def test_ranks_read_each_row_once_and_get_the_same_batches(workers: WorkerPool, shards: list[int]) -> None:
    (alone, *_), *_ = workers.run(read_on_ranks, shards, 7, world_size=1)
    answers = workers.run(read_on_ranks, shards, 7, world_size=3)
    for whole, begun, rest, _ in answers:
        assert whole == alone and begun + rest == alone
    rows = [read for *_, read in answers]
    if len(shards) == 1:
        assert rows == [list(range(100))] * 3, "one shard is read by every rank"
    else:
        assert sorted(chain(*rows)) == list(range(100))
        assert max(map(len, rows)) < 100, "no rank reads everything"


def fail_on_a_rank(shards: list[int], fails_at: int) -> str:
    """Read a stream of which one row cannot be read, and return the error."""
    table = stream(shards, fails_at=fails_at)
    order = {"batch_size": 5, "shuffle_buffer": 16, "rank": dist.get_rank(), "num_ranks": dist.get_world_size()}
    with pytest.raises(DataError) as caught:
        drawn(loader(table, **order), 20)
    return str(caught.value)


def test_a_row_that_one_rank_cannot_read_is_named_on_all_ranks(workers: WorkerPool) -> None:
    answers = workers.run(fail_on_a_rank, [10] * 4, 17, world_size=2)
    told = "row 7 of part 2 of 4 of numbers cannot be read: ConnectionError(the line is dead); a run resumed"
    assert answers[0] == answers[1] and answers[0].startswith(told)


def test_a_value_that_ranks_cannot_exchange_is_named_with_its_row_and_column() -> None:
    table = stream([5] * 4).map(lambda row: {"sound": 1j})
    divided = loader(table, batch_size=2, shuffle_buffer=8, shuffle=True, num_ranks=2, reads_ahead=False)
    named = r"column 'sound' of row 0 of part 1 of 4 of numbers cannot be sent to the other ranks.* builtins.complex is"
    with pytest.raises(DataError, match=named):
        drawn(divided, 1)


def learn_apart(shards: list[int], max_staleness: int) -> list[Any]:
    """Return every response of four iterations of a run whose ranks generate and train apart, from a divided stream."""
    models = {role: tiny_model("llama", vocab_size=259) for role in ("actor", "reference")}
    module = runs.RecordedGRPO(
        models["actor"], runs.low_tokens, reference=models["reference"], sampling=runs.SAMPLING, learning_rate=1e-2,
        tokenizer=byte_tokenizer(),
    )  # fmt: skip
    rows = stream(shards).map(lambda row: {"prompt": f"<{row['at']}>"}, remove_columns=["at"])
    data = PromptDataModule(rows, batch_size=4, seed=5, shuffle_buffer=6)
    plan = runs.calls(actor_generate="dp1@0", reference_infer="dp1@1", actor_train="dp1@1")
    strategy = ReallocStrategy(plan, max_staleness=max_staleness)
    runs.trainer(strategy, runs.world_size(), max_steps=4, max_epochs=-1).fit(module, data)
    return module.tokens


@pytest.mark.parametrize("max_staleness", matrix([0, 1], 1))
def test_ranks_that_generate_and_train_apart_divide_a_stream(workers: WorkerPool, max_staleness: int) -> None:
    first, second = workers.run(learn_apart, [5, 6, 7], max_staleness, world_size=2, init_process_group=False)
    assert len(first) == 4 and first == second
