"""The scheduler's promises, checked by playing its turns on slots that remember what they hold."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lightning_realloc.generation.scheduler import Admission, Move, Prompt, Scheduler


def play(prompts: list[Prompt], lengths: dict[int, int], num_slots: int, max_prefill_tokens: int) -> list[list[int]]:
    """Run every sample for ``lengths[sample]`` turns, checking every promise; return who ran in each turn."""
    scheduler = Scheduler(prompts, num_slots=num_slots, max_prefill_tokens=max_prefill_tokens)
    prompts_by_index = {prompt.index: prompt for prompt in prompts}
    prompt_of = {sample: prompt for prompt in prompts for sample in prompt.samples}
    held_prompt: dict[int, int] = {}
    held_sample: dict[int, int] = {}
    left = dict(lengths)
    computed: list[int] = []
    history: list[list[int]] = []
    while scheduler.has_work:
        turn = scheduler.next_turn()
        fresh = [admission for admission in turn.admissions if admission.source is None]
        for admission in turn.admissions:
            assert len(admission.samples) == len(admission.slots)
            if admission.source is not None:
                assert held_prompt[admission.source] == admission.prompt
                for slot in admission.slots:
                    held_prompt[slot] = admission.prompt
        for move in turn.moves:
            held_prompt[move.target] = held_prompt[move.source]
            held_sample[move.target] = held_sample[move.source]
        for admission in turn.admissions:
            for slot, sample in zip(admission.slots, admission.samples, strict=True):
                held_prompt[slot], held_sample[slot] = admission.prompt, sample
        computed += [admission.prompt for admission in fresh]
        sizes = [prompts_by_index[admission.prompt].num_tokens for admission in fresh]
        assert sum(sizes) <= max(max_prefill_tokens, *sizes, 0)
        running = list(scheduler.running)
        assert running and None not in running, "running samples fill the first slots"
        assert len(running) <= num_slots
        for slot, sample in enumerate(running):
            assert sample is not None
            assert held_sample[slot] == sample and held_prompt[slot] == prompt_of[sample].index
            left[sample] -= 1
            if not left[sample]:
                scheduler.finish(slot)
        history.append([sample for sample in running if sample is not None])
    assert sorted(computed) == sorted(prompt.index for prompt in prompts), "every prompt is computed exactly once"
    assert not any(left.values())
    return history


def make_prompts(sizes: list[int], n: int, hints: list[int] | None = None) -> list[Prompt]:
    hints = hints or [0] * len(sizes)
    return [
        Prompt(index, size, tuple(range(index * n, (index + 1) * n)), hint)
        for index, (size, hint) in enumerate(zip(sizes, hints, strict=True))
    ]


@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=8),
    n=st.integers(1, 5),
    num_slots=st.integers(1, 7),
    max_prefill_tokens=st.integers(1, 30),
    data=st.data(),
)
def test_every_sample_runs_to_its_end_and_every_prompt_is_computed_once(
    sizes: list[int], n: int, num_slots: int, max_prefill_tokens: int, data: st.DataObject
) -> None:
    total = len(sizes) * n
    lengths = data.draw(st.lists(st.integers(1, 6), min_size=total, max_size=total))
    history = play(make_prompts(sizes, n), dict(enumerate(lengths)), num_slots, max_prefill_tokens)
    assert sum(map(len, history)) == sum(lengths)  # nobody runs a step longer than its response


def test_a_free_slot_is_refilled_in_the_next_turn() -> None:
    history = play(make_prompts([3, 3, 3], 1), {0: 1, 1: 3, 2: 2}, num_slots=2, max_prefill_tokens=100)
    # Sample 0 ends after one turn and sample 2 takes its slot.
    assert history == [[0, 1], [2, 1], [2, 1]]


def test_the_last_sample_moves_into_a_hole_that_nobody_waits_for() -> None:
    scheduler = Scheduler(make_prompts([1, 1, 1], 1), num_slots=3)
    scheduler.next_turn()
    scheduler.finish(0)
    assert scheduler.next_turn().moves == (Move(source=2, target=0),)
    assert list(scheduler.running) == [2, 1]


def test_later_samples_of_a_prompt_copy_it_from_a_slot_that_holds_it() -> None:
    scheduler = Scheduler(make_prompts([4], 3), num_slots=2)
    assert scheduler.next_turn().admissions == (Admission(0, (0, 1), (0, 1), source=None),)
    scheduler.finish(1)
    assert scheduler.next_turn().admissions == (Admission(0, (2,), (1,), source=0),)


def test_longest_hint_goes_first_and_equal_hints_keep_their_order() -> None:
    scheduler = Scheduler(make_prompts([1, 1, 1, 1], 1, hints=[5, 9, 5, 9]), num_slots=4)
    assert [admission.prompt for admission in scheduler.next_turn().admissions] == [1, 3, 0, 2]


def test_prompts_beyond_the_prefill_budget_wait_a_turn() -> None:
    scheduler = Scheduler(make_prompts([50, 6, 5, 1], 1), num_slots=4, max_prefill_tokens=10)
    # One prompt passes whatever its size; then 6, for which 5 more would exceed 10; then 5 and 1.
    turns = [[admission.prompt for admission in scheduler.next_turn().admissions] for _ in range(4)]
    assert turns == [[0], [1], [2, 3], []]
