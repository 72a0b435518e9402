"""Batches that are drawn by a curriculum and a mixture of data sets: proportions, rests, preferences, resuming."""

from __future__ import annotations

import copy
import math
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from itertools import islice, pairwise
from typing import Any

import lightning as L
import pytest
import torch
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_realloc import SFT, Curriculum, DatasetSource, PromptDataModule
from lightning_realloc.batch.samples import Samples
from lightning_realloc.data.sampling.curriculum import resolve_curriculum
from lightning_realloc.data.sampling.drawn_loader import DrawnLoader
from lightning_realloc.data.sampling.mixture import Mixture
from lightning_realloc.errors import CheckpointError, DataError
from tests.models import byte_tokenizer, tiny_model

NAN = math.nan


def make_loader(curriculum: Curriculum | None = None, *, rows: Any = 12, mix: Any = None, size: int = 4) -> DrawnLoader:
    """Return a loader of so many rows, or of data sets of so many."""
    sets = rows if isinstance(rows, dict) else {"data": rows}
    table = Samples(torch.arange(sum(sets.values())), {})
    mixture = Mixture(mix or sets, list(sets))
    return DrawnLoader(table, batch_size=size, sets=sets, mixture=mixture, curriculum=curriculum, seed=3)


def draw(loader: DrawnLoader, count: int) -> list[list[int]]:
    """Return the rows of so many batches, over all epochs."""
    found: list[list[int]] = []
    while len(found) < count:
        found += (batch.ids.tolist() for batch in islice(loader, count - len(found)))
        assert loader._position in (0, len(loader)) or len(found) == count
    return [[number % len(loader.table) for number in batch] for batch in found]


def run(loader: DrawnLoader, count: int, reward_of: Callable[[int, int], Sequence[float]]) -> list[list[int]]:
    """Return the rows of batches whose rewards, of a row in a batch, are recorded before the next batch is drawn."""
    found: list[list[int]] = []
    batches = iter(loader)
    while len(found) < count:
        batch = next(batches, None)
        if batch is None:
            batches = iter(loader)
            continue
        rows = [number % len(loader.table) for number in batch.ids.tolist()]
        report(loader, batch.ids.tolist(), [reward_of(row, len(found)) for row in rows])
        found.append(rows)
    return found


def report(loader: DrawnLoader, ids: Sequence[int], rewards: Sequence[Sequence[float]]) -> dict[str, float]:
    """Record the rewards of a batch's groups."""
    prompts = [number for number, group in zip(ids, rewards, strict=True) for _ in group]
    return loader.record(torch.tensor(prompts), torch.tensor([reward for group in rewards for reward in group]))


# ---- mixtures
@settings(max_examples=60)
@given(
    weights=st.lists(st.integers(0, 9), min_size=2, max_size=4).filter(any),
    later=st.lists(st.integers(0, 9), min_size=4, max_size=4).filter(all),
    size=st.integers(1, 7),
)
def test_sets_are_drawn_in_exact_proportions_without_drift(weights: list[int], later: list[int], size: int) -> None:
    names = "abcd"[: len(weights)]
    schedule = [(0, dict(zip(names, weights, strict=True))), (5, dict(zip(names, later, strict=False)))]
    mixture, drawn, due = Mixture(schedule, list(names)), Counter(dict.fromkeys(names, 0)), Counter[str]()
    for batch in range(12):
        counts = mixture.counts(batch, size, drawn)
        assert sum(counts.values()) == size and min(counts.values()) >= 0
        drawn.update(counts)
        now = schedule[batch >= 5][1]
        for name in names:
            due[name] += Fraction(now[name] * size, sum(now.values()))  # type: ignore[assignment]
            assert abs(drawn[name] - due[name]) < max(1, len(names) - 1)
    assert mixture.due(12, size) == due


def test_each_set_gives_all_its_rows_before_one_comes_again() -> None:
    loader = make_loader(rows={"a": 10, "b": 3}, mix={"a": 0.7, "b": 0.3})
    assert len(loader) == 4
    rows = [row for batch in draw(loader, 25) for row in batch]
    for mine, of_set, share in (
        (range(10), [r for r in rows if r < 10], 70),
        (range(10, 13), [r for r in rows if r >= 10], 30),
    ):
        assert len(of_set) == share
        passes = [of_set[at : at + len(mine)] for at in range(0, share, len(mine))]
        assert all(sorted(one) == list(mine) for one in passes)
        assert len(set(map(tuple, passes))) > 1  # each pass has an order of its own
    metrics = report(make_loader(rows={"a": 10, "b": 3}), [0, 10, 14, 11], [[1.0, 0.0], [0.0, NAN], [1.0], [NAN]])
    assert metrics == {
        "set_share/a": 0.5,
        "set_reward/a": pytest.approx(2 / 3),
        "set_share/b": 0.5,
        "set_reward/b": 0.0,
    }


@pytest.mark.parametrize(
    ("mix", "error"),
    [
        ({"a": 1.0}, "mix has weights for a, and data holds the sets a, b"),
        ({"a": 1.0, "b": -0.5}, "mix gives 'b' the weight -0.5"),
        ({"a": 1.0, "b": NAN}, "mix gives 'b' the weight nan"),
        ({"a": 0, "b": 0}, "mix gives all sets the weight 0"),
        ([(1, {"a": 1, "b": 1})], r"mix changes at the batches \[1\], which must begin with 0 and rise"),
        ([(0, {"a": 1, "b": 1}), (0, {"a": 1, "b": 2})], r"the batches \[0, 0\]"),
        ([{"a": 1, "b": 1}], "which is no batch with weights"),
        ("a", "mix='a' must have a weight for each data set"),
    ],
)
def test_a_mixture_that_cannot_be_drawn_is_refused(mix: Any, error: str) -> None:
    with pytest.raises(DataError, match=error):
        PromptDataModule({"a": [{"prompt": "1"}], "b": [{"prompt": "2"}]}, batch_size=1, mix=mix)


# ---- curricula
@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"hopeless": 0.5}, "hopeless=0.5, target=0.5 and solved=1.0 must be in this order"),
        ({"solved": 0.4}, "must be in this order"),
        ({"solved": 1.5}, "solved=1.5 must be a number between 0 and 1"),
        ({"spread": 0}, "spread=0 must be a number of at least 0.001|between 0.001 and inf"),
        ({"rest": 9.0}, "max_rest=8.0 must be a number of at least 9, since rest=9.0"),
        ({"rest_growth": 0.5}, "rest_growth=0.5 must be a number of at least 1"),
        ({"revisit": "a"}, "revisit='a' must be a number"),
        ({"min_responses": 2.5}, "min_responses=2.5 must be a whole number"),
        ({"reward_range": (1.0, 0.0)}, "must be finite and rise"),
        ({"reward_range": 1.0}, "reward_range=1.0 must be two numbers"),
    ],
)
def test_thresholds_out_of_order_are_refused(change: dict[str, Any], error: str) -> None:
    with pytest.raises(DataError, match=error):
        Curriculum(**change)


def test_a_name_stands_for_a_curriculum() -> None:
    assert resolve_curriculum("balanced") == Curriculum()
    assert resolve_curriculum("rest") == Curriculum(spread=math.inf)
    with pytest.raises(DataError, match=r"curriculum='easy' must be one of balanced, rest, a Curriculum\(...\)"):
        resolve_curriculum("easy")  # type: ignore[arg-type]


def test_new_prompts_come_first_and_solved_ones_rest_longer_each_time() -> None:
    half, solved, hopeless = [1.0, 0.0, 1.0, 0.0], [1.0] * 4, [0.0] * 4
    loader = make_loader(Curriculum(revisit=0.0))

    def reward_of(row: int, batch: int) -> Sequence[float]:
        return solved if row < 4 else hopeless if row < 6 else half

    batches = run(loader, 60, reward_of)
    assert sorted(row for batch in batches[:3] for row in batch) == list(range(12))  # a pass has three batches
    for row in range(6):
        at = [place for place, batch in enumerate(batches) if row in batch]
        rests = [later - earlier - 1 for earlier, later in pairwise(at)]
        # A rest is 1, 2, 4 and then 8 passes of three batches. A batch is drawn after it, at once or later.
        assert len(rests) >= 3 and all(rest >= least for rest, least in zip(rests, (3, 6, 12, 24), strict=False))
    drawn = Counter(row for batch in batches for row in batch)
    assert min(drawn[row] for row in range(6, 12)) > 2 * max(drawn[row] for row in range(6))


def test_a_prompt_that_is_no_longer_solved_is_drawn_again() -> None:
    def drawn_late(solved_until: int) -> int:
        loader = make_loader(Curriculum(revisit=0.0))
        batches = run(loader, 60, lambda row, batch: [1.0] * 4 if row == 0 and batch < solved_until else [0.5] * 4)
        return sum(0 in batch for batch in batches[20:])

    assert drawn_late(60) <= 2 and drawn_late(6) > 8


def test_prompts_near_the_target_are_drawn_most_often_and_none_is_forgotten() -> None:
    shares = [0.1, 0.3, 0.5, 0.7, 0.9] * 8
    loader = make_loader(Curriculum(target=0.7, spread=0.15, revisit=0.1), rows=40, size=8)
    batches = run(loader, 400, lambda row, _: [shares[row]] * 4)
    drawn = Counter(row for batch in batches[5:] for row in batch)
    by_share = [sum(count for row, count in drawn.items() if shares[row] == share) for share in shares[:5]]
    assert sorted(range(5), key=by_share.__getitem__)[-1] == 3 and by_share[3] > 2 * by_share[1]
    last = {row: max(place for place, batch in enumerate(batches) if row in batch) for row in range(40)}
    # A tenth of 3200 prompts visits the 40 prompts eight times: each comes again within 50 batches.
    assert min(last.values()) >= 400 - 51
    assert all(len(set(batch)) == 8 for batch in batches)


def test_small_groups_are_joined_until_a_share_is_measured() -> None:
    loader = make_loader(Curriculum(min_responses=4), rows=4)
    resting = []
    for _ in range(4):
        (batch,) = islice(loader, 1)
        metrics = report(loader, batch.ids.tolist(), [[1.0]] * 4)
        resting.append(metrics["curriculum/resting"])
        assert metrics["curriculum/difficulty"] == 0.0 and "curriculum/with_signal" not in metrics
    assert resting == [0.0, 0.0, 0.0, 1.0]


def test_metrics_tell_the_difficulty_of_a_batch() -> None:
    loader = make_loader(Curriculum(reward_range=(-1.0, 1.0)), rows=8)
    (batch,) = islice(loader, 1)
    rewards = [[1.0, 1.0, 1.0, 1.0], [1.0, -1.0, NAN, NAN], [-1.0] * 4, [NAN] * 4]
    metrics = report(loader, batch.ids.tolist(), rewards)
    assert metrics == {
        "curriculum/difficulty": 0.5,
        "curriculum/with_signal": pytest.approx(1 / 3),
        "curriculum/resting": 0.25,
        "curriculum/new": 0.5,
    }


@pytest.mark.parametrize("outside", [-1.0, 1.5])
def test_rewards_outside_of_the_range_are_warned_of_once(outside: float) -> None:
    loader = make_loader(Curriculum(), rows=8)
    (batch,) = islice(loader, 1)
    with pytest.warns(UserWarning, match=rf"a reward of {outside:g} lies outside .* reward_range=\(0, 1\)") as found:
        report(loader, batch.ids.tolist(), [[outside] * 4] * 4)
        report(loader, batch.ids.tolist(), [[outside] * 4] * 4)
    assert len(found) == 1
    with pytest.raises(DataError, match="curriculum=Curriculum is a class; make an object of it"):
        resolve_curriculum(Curriculum)  # type: ignore[arg-type]


def test_few_prompts_are_drawn_although_they_rest_or_wait() -> None:
    loader = make_loader(Curriculum(), rows=5)
    assert all(len(set(batch)) == 4 for batch in run(loader, 20, lambda *_: [1.0] * 4))
    silent = make_loader(Curriculum(), rows=5)
    assert all(len(set(batch)) == 4 for batch in draw(silent, 20))
    assert [len(batch) for batch in draw(make_loader(Curriculum(), rows=2), 5)] == [4] * 5


@pytest.mark.parametrize("delay", [0, 2])
@pytest.mark.parametrize("moment", [2, 5, 11])
def test_a_loader_resumes_with_what_it_measured(delay: int, moment: int) -> None:
    def make() -> DrawnLoader:
        mix = [(0, {"a": 0.5, "b": 0.5}), (7, {"a": 0.2, "b": 0.8})]
        return make_loader(Curriculum(new=0.5, revisit=0.2), rows={"a": 9, "b": 8}, mix=mix)

    def go_on(loader: DrawnLoader, waiting: deque[list[int]], count: int) -> list[list[int]]:
        found = []
        while len(found) < count:
            for batch in loader:
                found.append(batch.ids.tolist())
                waiting.append(found[-1])
                if len(waiting) > delay:
                    ids = waiting.popleft()
                    report(loader, ids, [[float((number * 7 + turn) % 3 > 0) for turn in range(4)] for number in ids])
                if len(found) == count:
                    break
        return found

    whole, waiting = make(), deque[list[int]]()
    expected = go_on(make(), deque(), 20)
    assert go_on(whole, waiting, moment) == expected[:moment]
    resumed = make()
    resumed.load_state_dict(copy.deepcopy(whole.state_dict()))
    assert go_on(resumed, waiting, 20 - moment) == expected[moment:]
    assert len({number for batch in expected for number in batch}) == 80  # ids are never used twice


def test_a_checkpoint_of_another_curriculum_or_mixture_is_refused() -> None:
    state = make_loader(Curriculum(), rows={"a": 4, "b": 4}).state_dict()
    with pytest.raises(CheckpointError, match="has curriculum="):
        make_loader(rows={"a": 4, "b": 4}).load_state_dict(state)
    with pytest.raises(CheckpointError, match="has mix="):
        make_loader(Curriculum(), rows={"a": 4, "b": 4}, mix={"a": 1, "b": 3}).load_state_dict(state)


# ---- data modules
def test_named_sets_are_joined_with_their_names_and_missing_columns() -> None:
    sets = {
        "sums": [{"prompt": "1+1=", "answer": "2"}],
        "code": Dataset.from_list([{"prompt": "f", "tests": ["t"]}] * 3),
    }
    data = PromptDataModule(sets, batch_size=4, tokenizer=byte_tokenizer(), val_data={"sums": sets["sums"]})
    data.setup()
    (batch,) = data.train_dataloader()
    assert batch.objects("data_set") == ("sums", "code", "code", "code")
    assert batch.objects("answer") == ("2", None, None, None)
    assert batch.objects("tests") == (None, ["t"], ["t"], ["t"])
    (held_out,) = data.val_dataloader()
    assert held_out.objects("data_set") == ("sums",)


ROWS: list[Mapping[str, Any]] = [{"prompt": f"{number}"} for number in range(4)]
STREAM = DatasetSource("rows.jsonl", streaming=True)


@pytest.mark.parametrize(
    ("data", "change", "error"),
    [
        (STREAM, {"curriculum": "balanced"}, "a curriculum draws batches from all rows, which a stream"),
        ({"a": ROWS, "b": STREAM}, {}, "data with names draws batches from all rows, which a stream"),
        (None, {"curriculum": "balanced"}, "a curriculum needs prompts that come again"),
        (ROWS, {"mix": {"a": 1}}, "mix={'a': 1} weighs data sets by name, and data has no names"),
        (ROWS, {"curriculum": "rest", "bucket_batches": 2}, "bucket_batches=2 orders the rows"),
        ({"a": [{"prompt": "x", "data_set": "y"}]}, {}, "row 0 of the data set has a column 'data_set'"),
        ({"a": ROWS, "b": [{"question": "x"}]}, {}, "no column 'prompt'.*of the data set 'b'"),
        ({}, {}, "data={} names no data set"),
        (ROWS, {"val_data": {}}, "val_data={} names no data set"),
        ({"a": ROWS, 2: ROWS}, {}, "data names a data set 2, and names are text"),
        ({"a": ROWS, "b": [{"prompt": "x" * 99}]}, {"long_prompts": "drop"}, "no row of b is left to train on"),
    ],
)
def test_data_that_cannot_be_drawn_is_refused(data: Any, change: dict[str, Any], error: str) -> None:
    with pytest.raises(DataError, match=error):
        module = PromptDataModule(data, batch_size=1, tokenizer=byte_tokenizer(), max_prompt_tokens=64, **change)
        module.setup()
        module.train_dataloader()


def test_a_curriculum_needs_rewards_and_changing_batches() -> None:
    data = PromptDataModule(ROWS, batch_size=2, tokenizer=byte_tokenizer(), curriculum="balanced")
    data.trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, overfit_batches=1)
    with pytest.raises(DataError, match="overfit_batches trains on the same batches"):
        data.setup()
    data.trainer.strategy._lightning_module = SFT(tiny_model("llama"), tokenizer=byte_tokenizer())
    with pytest.raises(DataError, match="by the rewards of training, and SFT reports none"):
        data.setup()
