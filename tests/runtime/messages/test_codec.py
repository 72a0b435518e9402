"""Samples of one rank reach every rank unchanged, and so does the exception of a failed rank."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from lightning_realloc.batch.ragged import Ragged
from lightning_realloc.batch.samples import Samples
from lightning_realloc.errors import DataError, RewardError
from lightning_realloc.runtime.messages.codec import all_gather_samples, decode_message, encode_message
from tests.workers import WorkerPool


def _samples(ids: list[int]) -> Samples:
    count = len(ids)
    return Samples(
        torch.tensor(ids, dtype=torch.int64),
        {
            "response_ids": Ragged.from_list([list(range(sample_id)) for sample_id in ids]),
            "logprobs": Ragged.from_list([[0.5] * sample_id for sample_id in ids], dtype=torch.float32),
            "matrix": torch.arange(count * 6, dtype=torch.float64).view(count, 2, 3),
            "narrow": torch.full((count,), 1 / 3, dtype=torch.bfloat16),
            "flag": torch.arange(count) % 2 == 0,
        },
    )


@pytest.mark.parametrize("ids", [[3, 1, 0, 7], [0], []], ids=str)
def test_samples_come_back_bit_for_bit(ids: list[int]) -> None:
    samples = _samples(ids)
    assert decode_message(encode_message(samples)).equals(samples)


def test_python_objects_are_not_sent() -> None:
    samples = _samples([1, 2]).with_columns(prompt=("a", object()))
    assert decode_message(encode_message({"made": (samples, 3)}))["made"][0].equals(_samples([1, 2]))


def test_columns_of_any_dtype_are_sent() -> None:
    samples = Samples(torch.arange(2), {"phase": torch.tensor([1j, 2.0], dtype=torch.complex64)})
    assert torch.equal(decode_message(encode_message(samples)).tensor("phase"), samples.tensor("phase"))
    assert all_gather_samples(samples).equals(samples)


def test_the_only_rank_keeps_its_samples_in_order_and_raises_its_own_error() -> None:
    assert all_gather_samples(_samples([3, 1])).ids.tolist() == [1, 3]
    with pytest.raises(DataError, match="no rank contributed samples"):
        all_gather_samples(None)
    error = RuntimeError("mine")
    with pytest.raises(RuntimeError) as caught:
        all_gather_samples(error)
    assert caught.value is error


def gather_shares() -> list[Samples]:
    """Gather shares of different sizes, one of them empty, and with ranks that contribute nothing."""
    rank = dist.get_rank()
    shares = {0: [5, 2], 1: [], 2: [9, 0, 4], 3: [1]}
    everything = all_gather_samples(_samples(shares[rank]))
    only_last = all_gather_samples(_samples([8]) if rank == 3 else None)
    return [everything, only_last]


def test_every_rank_gets_everything_in_the_order_of_ids(workers: WorkerPool) -> None:
    for everything, only_last in workers.run(gather_shares):
        assert everything.ids.tolist() == [0, 1, 2, 4, 5, 9]
        assert everything.ragged("response_ids").equals(_samples([0, 1, 2, 4, 5, 9]).ragged("response_ids"))
        assert everything.tensor("narrow").dtype == torch.bfloat16
        assert only_last.equals(_samples([8]))


def gather_failures() -> list[str]:
    """Let ranks 1 and 3 fail with errors of the package, then rank 2 with another exception."""
    rank = dist.get_rank()
    texts = []
    for failures in ({1: RewardError("bad reward"), 3: DataError("bad data")}, {2: KeyError("typo")}):
        try:
            all_gather_samples(failures.get(rank, _samples([rank])))
        except Exception as error:
            texts.append(f"{type(error).__name__}: {error}; after {error.__cause__!r}")
    with pytest.raises(DataError, match="no rank contributed samples"):
        all_gather_samples(None)
    assert all_gather_samples(_samples([rank])).ids.tolist() == [0, 1, 2, 3]
    return texts


def test_the_exception_of_one_rank_is_raised_on_all(workers: WorkerPool) -> None:
    everyone = workers.run(gather_failures)
    reward = "RewardError: bad reward; after "
    unknown = "ReallocError: rank 2 failed with KeyError: 'typo'; after None"
    assert everyone[0] == [reward + "None", unknown]
    assert everyone[1] == [reward + "None", unknown]
    assert everyone[2] == [reward + "None", "KeyError: 'typo'; after None"]
    # All ranks raise the lowest rank's error; a rank with an error of its own has it as the cause.
    assert everyone[3] == [reward + "DataError('bad data')", unknown]
