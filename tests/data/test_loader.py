"""BatchLoader: deterministic batches, and runs of a plain Lightning Trainer that resume at the right batch."""

from __future__ import annotations

from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_realloc.batch.ragged import Ragged
from lightning_realloc.batch.samples import Samples
from lightning_realloc.data.loader import BatchLoader, EvaluationLoader
from lightning_realloc.errors import CheckpointError, DataError


def _table(num_rows: int) -> Samples:
    return Samples(torch.arange(num_rows), {"prompt": tuple(f"prompt {row}" for row in range(num_rows))})


def _epoch(loader: BatchLoader) -> list[list[int]]:
    return [batch.ids.tolist() for batch in loader]


def test_an_epoch_holds_every_row_once_and_ids_continue_over_epochs() -> None:
    loader = BatchLoader(_table(10), batch_size=4, seed=1)
    first, second = _epoch(loader), _epoch(loader)
    assert [len(batch) for batch in first] == [4, 4, 2]
    assert len(loader) == 3
    assert sorted(chain(*first)) == list(range(10))
    assert sorted(chain(*second)) == list(range(10, 20))
    assert [row - 10 for row in chain(*second)] != list(chain(*first))


def test_rows_of_several_samples_stay_whole_and_in_order() -> None:
    loader = BatchLoader(_table(10), batch_size=2, group_size=2, seed=1)
    first, second = _epoch(loader), _epoch(loader)
    assert [len(batch) for batch in first] == [4, 4, 2] and len(loader) == 3
    for epoch, offset in ((first, 0), (second, 10)):
        assert sorted(chain(*epoch)) == [offset + row for row in range(10)]
        pairs = [batch[i : i + 2] for batch in epoch for i in range(0, len(batch), 2)]
        assert all(pair[0] % 2 == 0 and pair[1] == pair[0] + 1 for pair in pairs)
    assert [row - 10 for row in chain(*second)] != list(chain(*first))
    assert loader.state_dict()["num_rows"] == 5
    held_out = EvaluationLoader(_table(6), batch_size=2, group_size=2)
    assert [batch.ids.tolist() for batch in held_out] == [[0, 1, 2, 3], [4, 5]] and len(held_out) == 2
    with pytest.raises(DataError, match="batch_size=4 needs as many rows, but there are 3"):
        BatchLoader(_table(6), batch_size=4, group_size=2, drop_last=True)


def test_ids_belong_to_their_rows() -> None:
    loader = BatchLoader(_table(5), batch_size=2)
    loader.set_epoch(3)
    for batch in loader:
        assert batch.objects("prompt") == tuple(f"prompt {sample_id - 15}" for sample_id in batch.ids.tolist())


def test_order_depends_on_seed_and_epoch_alone() -> None:
    def order(seed: int, epoch: int) -> list[list[int]]:
        loader = BatchLoader(_table(8), batch_size=3, seed=seed)
        loader.set_epoch(epoch)
        return _epoch(loader)

    assert order(1, 2) == order(1, 2)
    assert order(1, 2) != order(2, 2)
    assert _epoch(BatchLoader(_table(5), batch_size=2, shuffle=False)) == [[0, 1], [2, 3], [4]]


def test_a_small_last_batch_can_be_dropped() -> None:
    loader = BatchLoader(_table(10), batch_size=4, drop_last=True)
    assert [len(batch) for batch in loader] == [4, 4]
    assert len(loader) == 2
    with pytest.raises(DataError, match="batch_size=11 needs as many rows, but there are 10"):
        BatchLoader(_table(10), batch_size=11, drop_last=True)
    with pytest.raises(DataError, match="batch_size=0"):
        BatchLoader(_table(10), batch_size=0)


def test_a_loader_resumes_after_the_last_batch_it_returned() -> None:
    loader = BatchLoader(_table(10), batch_size=3, seed=4)
    loader.set_epoch(2)
    batches = iter(loader)
    handed_out = [next(batches).ids.tolist() for _ in range(2)]
    resumed, whole = BatchLoader(_table(10), batch_size=3, seed=4), BatchLoader(_table(10), batch_size=3, seed=4)
    resumed.load_state_dict(loader.state_dict())
    whole.set_epoch(2)
    assert handed_out + _epoch(resumed) == _epoch(whole)
    # the next epoch is whole again
    assert _epoch(resumed) == _epoch(whole)


def test_evaluation_batches_are_the_same_every_time() -> None:
    loader = EvaluationLoader(_table(5), batch_size=2)
    for _ in range(2):
        assert [batch.ids.tolist() for batch in loader] == [[0, 1], [2, 3], [4]]
    assert len(loader) == 3


@pytest.mark.parametrize("change", [{"batch_size": 4}, {"seed": 1}, {"shuffle": False}])
def test_a_position_in_other_data_is_refused(change: dict[str, Any]) -> None:
    state = BatchLoader(_table(10), batch_size=3).state_dict()
    with pytest.raises(CheckpointError, match=next(iter(change))):
        BatchLoader(_table(10), **{"batch_size": 3, **change}).load_state_dict(state)
    with pytest.raises(CheckpointError, match="num_rows=10 and this run num_rows=11"):
        BatchLoader(_table(11), batch_size=3).load_state_dict(state)


class _Recorder(L.LightningModule):
    """A module with one parameter that records its samples."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.seen: list[list[int]] = []

    def training_step(self, batch: Samples, batch_idx: int) -> torch.Tensor:
        self.seen.append(batch.ids.tolist())
        return self.weight.sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _fit(max_steps: int, *, resume: Path | None = None, save: Path | None = None, **settings: Any) -> list[list[int]]:
    """Return the samples of each step, with five batches an epoch."""
    module = _Recorder()
    trainer = L.Trainer(
        max_steps=max_steps, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        **{"max_epochs": -1, "enable_checkpointing": False, **settings},
    )  # fmt: skip
    limit = settings.get("limit_train_batches")
    loader = BatchLoader(_table(10), batch_size=2, seed=7, drop_last=True)
    loader.epoch_batches = limit or len(loader)
    trainer.fit(module, loader, ckpt_path=resume)
    if save is not None:
        trainer.save_checkpoint(save)
    return module.seen


# In the middle of the first and the second epoch, and exactly at the end of each.
@pytest.mark.parametrize("stop", [2, 5, 7, 10])
def test_a_trainer_resumes_from_a_checkpoint_saved_after_the_run(tmp_path: Path, stop: int) -> None:
    before = _fit(stop, save=tmp_path / "stop.ckpt")
    assert before + _fit(13, resume=tmp_path / "stop.ckpt") == _fit(13)


@pytest.mark.parametrize("limit", [None, 4])
def test_a_trainer_resumes_from_a_checkpoint_saved_during_the_run(tmp_path: Path, limit: int | None) -> None:
    saver = L.pytorch.callbacks.ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
    whole = _fit(13, callbacks=[saver], enable_checkpointing=True, limit_train_batches=limit)
    assert len(whole) == 13
    for stop in (1, 4, 5, 6, 8):
        after = _fit(13, resume=tmp_path / f"step={stop}.ckpt", limit_train_batches=limit)
        assert whole[:stop] + after == whole


def test_a_trainer_resumes_from_a_checkpoint_saved_at_the_end_of_an_epoch(tmp_path: Path) -> None:
    saver = L.pytorch.callbacks.ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)
    whole = _fit(-1, max_epochs=3, callbacks=[saver], enable_checkpointing=True)
    assert whole[:5] + _fit(-1, max_epochs=3, resume=tmp_path / "epoch=0.ckpt") == whole


def _long_table(num_rows: int, group_size: int = 1) -> Samples:
    """Return rows of 1 to 40 tokens, at random, as prompts and responses."""
    lengths = torch.randint(1, 20, (num_rows * group_size,), generator=torch.Generator().manual_seed(0)).tolist()
    sequences = Ragged.from_list([[1] * length for length in lengths])
    return Samples(torch.arange(num_rows * group_size), {"prompt_ids": sequences, "response_ids": sequences})


def _spread(loader: BatchLoader) -> int:
    """Return the sum over batches of the longest row's tokens minus the shortest row's."""
    lengths = [batch.ragged("prompt_ids").lengths.view(-1, loader.group_size).sum(1) for batch in loader]
    return sum(int(of.max() - of.min()) for of in lengths)


@pytest.mark.parametrize("group_size", [1, 2])
def test_buckets_hold_rows_of_similar_length_and_every_row_once(group_size: int) -> None:
    table = _long_table(50, group_size)
    settings = {"batch_size": 4, "seed": 3, "group_size": group_size}
    plain, some, all_rows = (BatchLoader(table, bucket_batches=count, **settings) for count in (None, 3, 100))
    epochs = [_epoch(loader) for loader in (plain, some, all_rows)]
    assert all(sorted(chain(*epoch)) == list(range(50 * group_size)) for epoch in epochs)
    assert all(len(epoch) == 13 and epoch[-1] == epochs[0][-1] for epoch in epochs)
    # Three batches of the bucketed order hold exactly the rows of three batches of the shuffled order.
    first = set(chain(*epochs[0][:3]))
    assert sum(set(batch) <= first for batch in epochs[1]) == 3
    spreads = [_spread(loader) for loader in (plain, some, all_rows)]
    assert spreads[0] > spreads[1] > spreads[2]
    means = [batch.ragged("prompt_ids").lengths.float().mean().item() for batch in all_rows]
    assert means != sorted(means), "short batches do not all come first"


def test_a_bucketed_order_is_resumed_and_differs_from_the_order_without() -> None:
    def loader(bucket_batches: int | None) -> BatchLoader:
        return BatchLoader(_long_table(20), batch_size=3, seed=1, bucket_batches=bucket_batches)

    whole, begun, resumed = loader(4), loader(4), loader(4)
    expected = _epoch(whole) + _epoch(whole)
    batches = iter(begun)
    assert [next(batches).ids.tolist() for _ in range(5)] == expected[:5]
    resumed.load_state_dict(begun.state_dict())
    assert _epoch(resumed) + _epoch(resumed) == expected[5:]
    with pytest.raises(CheckpointError, match="bucket_batches=4 and this run bucket_batches=None"):
        loader(None).load_state_dict(begun.state_dict())
    older = {name: value for name, value in loader(None).state_dict().items() if name != "bucket_batches"}
    loader(None).load_state_dict(older)
    with pytest.raises(DataError, match="bucket_batches=4 with shuffle=False"):
        BatchLoader(_long_table(4), batch_size=2, shuffle=False, bucket_batches=4)


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 40), st.integers(1, 7), st.integers(1, 12), st.integers(0, 3), st.booleans(), st.integers(0, 20)
)  # fmt: skip
def test_bucketed_batches_depend_on_the_seed_alone_and_resume_anywhere(
    num_rows: int, batch_size: int, bucket_batches: int, seed: int, drop_last: bool, stop: int
) -> None:
    batch_size = min(batch_size, num_rows)
    table, lengths = _long_table(num_rows), _long_table(num_rows).ragged("prompt_ids").lengths

    def loader(buckets: int | None = bucket_batches) -> BatchLoader:
        return BatchLoader(table, batch_size=batch_size, seed=seed, drop_last=drop_last, bucket_batches=buckets)

    def draw(batches: BatchLoader, count: int) -> list[list[int]]:
        epochs = chain.from_iterable(iter(batches) for _ in range(count + 1))
        return [batch.ids.tolist() for batch in islice(epochs, count)]

    whole, begun, resumed = draw(loader(), 45), loader(), loader()
    assert draw(begun, stop) == whole[:stop]
    resumed.load_state_dict(begun.state_dict())
    assert draw(resumed, 45 - stop) == whole[stop:]
    # Without buckets an epoch holds the same rows; within a window, batches do not overlap in length.
    num_batches, num_full = len(loader()), num_rows // batch_size
    plain = draw(loader(None), num_batches)
    assert sorted(chain(*whole[:num_batches])) == sorted(chain(*plain))
    for begin in range(0, num_full, bucket_batches):
        window = set(chain(*plain[begin : min(begin + bucket_batches, num_full)]))
        inside = [sorted(int(lengths[row]) for row in batch) for batch in whole[:num_full] if set(batch) <= window]
        assert sum(map(len, inside)) == len(window)
        assert all(before[-1] <= after[0] for before, after in pairwise(sorted(inside)))
