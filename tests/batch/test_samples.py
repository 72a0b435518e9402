"""Ragged and Samples compared with plain Python lists."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_realloc.batch.ragged import Ragged
from lightning_realloc.batch.samples import Samples
from lightning_realloc.errors import DataError

SEQUENCES = st.lists(st.lists(st.integers(0, 99), max_size=5), max_size=6)


def _samples() -> Samples:
    return Samples(
        torch.tensor([7, 3, 5]),
        {
            "prompt_ids": Ragged.from_list([[1, 2], [], [3, 4, 5]]),
            "rewards": torch.tensor([0.5, -1.0, 2.0]),
            "prompt": ("seven", "three", "five"),
        },
    )


@settings(deadline=None, max_examples=50)
@given(SEQUENCES, st.data())
def test_ragged_selection_is_list_indexing(sequences: list[list[int]], data: st.DataObject) -> None:
    ragged = Ragged.from_list(sequences)
    indices = data.draw(st.lists(st.integers(0, len(sequences) - 1), max_size=8)) if sequences else []
    assert ragged.to_lists() == sequences
    assert ragged.select(indices).to_lists() == [sequences[i] for i in indices]
    assert [row.tolist() for row in ragged.split()] == sequences
    assert ragged.num_tokens == sum(map(len, sequences))


@settings(deadline=None, max_examples=30)
@given(st.lists(SEQUENCES, min_size=1, max_size=4))
def test_ragged_concatenation_is_list_concatenation(parts: list[list[list[int]]]) -> None:
    joined = Ragged.concatenate([Ragged.from_list(part) for part in parts])
    assert joined.to_lists() == [row for part in parts for row in part]


def test_ragged_offsets_bound_every_sequence() -> None:
    # lengths 2, 0, 3 begin at 0, 2, 2 and the last ends at 5
    assert Ragged.from_list([[1, 2], [], [3, 4, 5]]).offsets.tolist() == [0, 2, 2, 5]


def test_ragged_keeps_the_dtype_and_trailing_dimensions_of_its_rows() -> None:
    ragged = Ragged.from_list([torch.ones(2, 3, dtype=torch.bfloat16), torch.zeros(1, 3, dtype=torch.bfloat16)])
    assert ragged.values.shape == (3, 3)
    assert ragged.values.dtype == torch.bfloat16
    assert Ragged.from_list([[0.5], [1.5, 2.5]], dtype=torch.float32).values.tolist() == [0.5, 1.5, 2.5]


@pytest.mark.parametrize(
    ("values", "lengths", "rule"),
    [
        (torch.arange(3), torch.tensor([2, 2]), "sum to the 3 tokens"),
        (torch.arange(3), torch.tensor([4, -1]), "may not be negative"),
        (torch.arange(3), torch.tensor([3], dtype=torch.int32), "1-D int64"),
        (torch.tensor(3), torch.tensor([1]), "token dimension"),
    ],
)
def test_ragged_refuses_lengths_that_do_not_describe_its_values(
    values: torch.Tensor, lengths: torch.Tensor, rule: str
) -> None:
    with pytest.raises(DataError, match=rule):
        Ragged(values, lengths)


def test_samples_are_picked_by_id_and_by_position() -> None:
    samples = _samples()
    for picked in (samples.by_ids([5, 7]), samples.select([2, 0]), samples.select(torch.tensor([2, 0]))):
        assert picked.ids.tolist() == [5, 7]
        assert picked.ragged("prompt_ids").to_lists() == [[3, 4, 5], [1, 2]]
        assert picked.tensor("rewards").tolist() == [2.0, 0.5]
        assert picked.objects("prompt") == ("five", "seven")


@given(st.lists(st.lists(st.integers(0, 3), max_size=4), min_size=1, max_size=4))
def test_several_selections_at_once_are_those_one_by_one(parts: list[list[int]]) -> None:
    parts = [list(dict.fromkeys(part)) for part in parts]
    sequences = Ragged.from_list([[1, 2], [], [3], [4, 5, 6]])
    columns = {"s": sequences, "t": torch.arange(8.0).view(4, 2), "o": ("a", "b", "c", "d")}
    samples = Samples(torch.tensor([5, 9, 2, 7]), columns)
    for found, part in zip(
        samples.select_parts([np.array(part, dtype=np.int64) for part in parts]), parts, strict=True
    ):
        assert found.equals(samples.select(part))


def test_concatenating_the_parts_restores_the_samples() -> None:
    samples = _samples()
    restored = Samples.concatenate([samples.select([1, 2]), samples.select([0])]).by_ids(samples.ids)
    assert restored.equals(samples)
    assert samples.sorted_by_id().ids.tolist() == [3, 5, 7]


def test_equality_compares_every_kind_of_column() -> None:
    samples = _samples()
    assert samples.equals(_samples())
    assert not samples.equals(samples.with_columns(prompt=("seven", "three", "six")))
    assert not samples.equals(samples.with_columns(prompt_ids=Ragged.from_list([[1, 2], [3], [4, 5]])))
    assert not samples.equals(samples.without_columns("rewards"))
    nudged = samples.with_columns(rewards=torch.tensor([0.5, -1.0, 2.001]))
    assert not samples.equals(nudged)
    assert samples.equals(nudged, atol=0.01)


def test_repeated_samples_get_adjacent_ids() -> None:
    repeated = _samples().select([0, 1]).repeat(2)
    # id * 2 + k: 7 -> 14, 15 and 3 -> 6, 7
    assert repeated.ids.tolist() == [14, 15, 6, 7]
    assert repeated.objects("prompt") == ("seven", "seven", "three", "three")


def test_samples_survive_pickling() -> None:
    assert pickle.loads(pickle.dumps(_samples())).equals(_samples())


def test_samples_refuse_columns_that_do_not_fit() -> None:
    samples = _samples()
    with pytest.raises(DataError, match="'rewards' must have one row for each of the 3 samples; it has 2"):
        samples.with_columns(rewards=torch.zeros(2))
    with pytest.raises(DataError, match="tuple of objects; got list"):
        samples.with_columns(prompt=["a", "b", "c"])  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"unique; repeated: \[3\]"):
        Samples(torch.tensor([3, 3]), {})
    with pytest.raises(DataError, match="'rewards' must hold sequences"):
        samples.ragged("rewards")
    with pytest.raises(DataError, match="no column 'reward'"):
        samples["reward"]


def test_missing_ids_and_differing_columns_are_named() -> None:
    samples = _samples()
    with pytest.raises(DataError, match=r"1 of 2 sample ids are not here, the first are \[4\]"):
        samples.by_ids([3, 4])
    with pytest.raises(DataError, match=r"positions must lie in 0\.\.2; got 3\.\.3"):
        samples.select([3])
    with pytest.raises(DataError, match=r"\['rewards'\]"):
        Samples.concatenate([samples.select([0]), samples.select([1]).without_columns("rewards")])
    with pytest.raises(DataError, match="at least one part"):
        Samples.concatenate([])


def test_lengths_only_keeps_lengths_and_drops_tokens() -> None:
    columns = {"ids": Ragged.from_list([[4, 5], []]), "score": torch.ones(2), "text": ("a", "b")}
    samples = Samples(torch.tensor([3, 1]), columns)
    bare = samples.lengths_only()
    assert bare.ragged("ids").values.shape == (2, 0)
    assert bare.ragged("ids").lengths.tolist() == [2, 0]
    assert bare.without_columns("ids").equals(samples.without_columns("ids"))
    assert bare.lengths_only().equals(bare)
