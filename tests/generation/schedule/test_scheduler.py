"""Invariants of the scheduler, checked by simulating its steps on slots that record their contents."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hypothesis import given
from hypothesis import strategies as st

from lightning_realloc.generation.schedule.scheduler import Scheduler
from lightning_realloc.generation.schedule.slot_plan import Admission, Move, Prompt, Read, Step, Swap

Label = tuple[str, int]
"""Content of one position of a slot: a token of a prompt or of a sample."""


@dataclass(frozen=True)
class Pause:
    """A sample waits ``num_steps`` once it ran ``after`` steps, and then has ``num_tokens`` more to read.

    With ``is_last`` it ends instead.
    """

    after: int
    num_steps: int
    num_tokens: int
    is_last: bool = False


class Slots:
    """Slots that record their contents and check every step against them."""

    def __init__(self, prompts: list[Prompt]) -> None:
        self.held: dict[int, list[Label]] = {}
        self.sequences = {
            sample: [("prompt", prompt.index)] * prompt.num_tokens for prompt in prompts for sample in prompt.samples
        }
        self.prompts = {prompt.index: prompt for prompt in prompts}
        self.read_of_prompts: list[int] = []
        self.preempted: list[int] = []

    def carry_out(self, step: Step, max_prefill_tokens: int) -> None:
        self.preempted += step.preempted
        for admission in step.admissions:
            assert len(admission.samples) == len(admission.slots)
            kept: list[Label] = []
            if admission.source is not None:
                length = self.prompts[admission.prompt].num_tokens
                kept = self.held[admission.source][:length]
                assert kept == [("prompt", admission.prompt)] * length, "the source holds the prompt"
            for slot in admission.slots:
                self.held[slot] = list(kept)
        for move in step.moves:
            moved = self.held[move.source]
            if isinstance(move, Swap):
                self.held[move.source] = self.held[move.target]
            self.held[move.target] = list(moved)
        assert sum(read.end - read.begin for read in step.reads) <= max_prefill_tokens
        for read in step.reads:
            labels = self.sequences[read.samples[0]][read.begin : read.end]
            if read.samples[0] not in self.preempted:
                self.read_of_prompts += [prompt for kind, prompt in labels if kind == "prompt"]
            for slot in read.slots:
                assert len(self.held[slot]) == read.begin, "what is before it is there"
                self.held[slot] += labels


class Play:
    """A call without a model: samples run, wait for their environment and run on, or are dropped."""

    def __init__(
        self, prompts: list[Prompt], lengths: dict[int, int], num_slots: int, max_prefill_tokens: int,
        pauses: Mapping[int, Pause] | None = None, num_kept: int = 0,
    ) -> None:  # fmt: skip
        """Run every sample for ``lengths[sample]`` steps."""
        self.scheduler = Scheduler(
            prompts, num_slots=num_slots, num_kept=num_kept, max_prefill_tokens=max_prefill_tokens
        )
        self.prompts, self.lengths, self.max_prefill_tokens = prompts, lengths, max_prefill_tokens
        self.slots, self.pauses = Slots(prompts), dict(pauses or {})
        self.left, self.waiting = dict(lengths), dict[int, Pause]()
        self.history: list[list[int]] = []

    def run(self, holds: Sequence[bool] = (False,)) -> Play:
        """Run all samples and check the invariants.

        ``holds`` states for one step after the other whether prompts are deferred while samples run.
        """
        while self.scheduler.has_work or self.waiting:
            self._answer()
            self._step(should_defer=holds[len(self.history) % len(holds)])
        assert not any(self.left.values())
        return self

    def _answer(self) -> None:
        for sample, pause in list(self.waiting.items()):
            self.waiting[sample] = replace(pause, num_steps=pause.num_steps - 1)
            if pause.num_steps:
                continue
            del self.waiting[sample]
            begin = len(self.slots.sequences[sample])
            if pause.is_last:
                self.left[sample] = 0
                self.scheduler.drop(sample)
                continue
            self.slots.sequences[sample] += [("sample", sample)] * pause.num_tokens
            if self.scheduler.is_parked(sample):
                self.scheduler.read(sample, begin, begin + pause.num_tokens)
            else:
                assert sample in self.slots.preempted
                index = next(prompt.index for prompt in self.prompts if sample in prompt.samples)
                self.scheduler.add(Prompt(index, begin + pause.num_tokens, (sample,)))

    def _step(self, *, should_defer: bool) -> None:
        scheduler, slots = self.scheduler, self.slots
        before = [sample for sample in scheduler.running if sample is not None and not scheduler.is_parked(sample)]
        should_defer = should_defer and bool(before)
        reads_to_admit, scheduler.should_defer = scheduler.reads_to_admit, should_defer
        step = scheduler.next_step()
        assert not (should_defer and reads_to_admit and step.reads), "what waits for more to be read is not read alone"
        assert {*step.preempted} <= self.waiting.keys(), "only waiting samples give their slots away"
        slots.carry_out(step, self.max_prefill_tokens)
        running = [sample for sample in scheduler.running if sample is not None]
        assert len(running) == len(scheduler.running), "running samples fill the first slots"
        assert running or step.reads or self.waiting.keys() >= {s for s in scheduler.slots if s is not None}
        assert running or step.reads or not scheduler.num_waiting, "somebody gets further"
        assert len({*running, *(sample for read in step.reads for sample in read.samples)}) <= scheduler.num_slots
        assert len(scheduler.slots) <= scheduler.most_slots
        for slot, sample in enumerate(running):
            assert slots.held[slot] == slots.sequences[sample], "a slot holds all that its sample needs"
            slots.held[slot].append(("sample", sample))
            slots.sequences[sample].append(("sample", sample))
            self._end_token(slot, sample)
        self.history.append(running)

    def _end_token(self, slot: int, sample: int) -> None:
        self.left[sample] -= 1
        if not self.left[sample]:
            self.scheduler.finish(slot)
        elif sample in self.pauses and self.lengths[sample] - self.left[sample] >= self.pauses[sample].after:
            self.scheduler.park(slot, len(self.slots.held[slot]))
            self.waiting[sample] = self.pauses.pop(sample)


def play(prompts: list[Prompt], lengths: dict[int, int], num_slots: int, max_prefill_tokens: int) -> list[list[int]]:
    """Run every sample for ``lengths[sample]`` steps, and return the running samples of each step."""
    return Play(prompts, lengths, num_slots, max_prefill_tokens).run().history


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
    num_kept=st.integers(0, 5),
    max_prefill_tokens=st.integers(1, 30),
    data=st.data(),
)
def test_every_sample_finishes_and_every_prompt_is_computed_once(
    sizes: list[int], n: int, num_slots: int, num_kept: int, max_prefill_tokens: int, data: st.DataObject
) -> None:
    total, prompts = len(sizes) * n, make_prompts(sizes, n)
    lengths = data.draw(st.lists(st.integers(1, 6), min_size=total, max_size=total))
    pause = st.builds(
        Pause, after=st.integers(1, 4), num_steps=st.integers(0, 15), num_tokens=st.integers(1, 12),
        is_last=st.booleans(),
    )  # fmt: skip
    pauses = data.draw(st.dictionaries(st.integers(0, total - 1), pause))
    holds = data.draw(st.lists(st.booleans(), min_size=1, max_size=9))
    played = Play(prompts, dict(enumerate(lengths)), num_slots, max_prefill_tokens, pauses, num_kept).run(holds)
    num_run = [min(length, pauses[sample].after) if sample in pauses and pauses[sample].is_last else length
               for sample, length in enumerate(lengths)]  # fmt: skip
    assert sum(map(len, played.history)) == sum(num_run)  # no sample runs longer than its response
    read, once = Counter(played.slots.read_of_prompts), {prompt.index: prompt.num_tokens for prompt in prompts}
    num_drops = sum(pause.is_last for pause in pauses.values())
    for index, num_tokens in once.items():  # a drop may free the last slot that holds a prompt
        assert read[index] in {num_tokens * times for times in range(1, 2 + num_drops)}


def test_a_free_slot_is_refilled_in_the_next_step() -> None:
    history = play(make_prompts([3, 3, 3], 1), {0: 1, 1: 3, 2: 2}, num_slots=2, max_prefill_tokens=100)
    # Sample 0 ends after one step and sample 2 takes its slot.
    assert history == [[0, 1], [2, 1], [2, 1]]


def test_the_last_sample_moves_into_a_free_slot_if_no_sample_waits_for_it() -> None:
    scheduler = Scheduler(make_prompts([1, 1, 1], 1), num_slots=3)
    scheduler.next_step()
    scheduler.finish(0)
    assert scheduler.next_step().moves == (Move(source=2, target=0),)
    assert list(scheduler.running) == [2, 1]


def test_later_samples_of_a_prompt_copy_it_from_a_slot_that_holds_it() -> None:
    scheduler = Scheduler(make_prompts([4], 3), num_slots=2)
    assert scheduler.next_step().admissions == (Admission(0, (0, 1), (0, 1), source=None),)
    scheduler.finish(1)
    assert scheduler.next_step().admissions == (Admission(0, (2,), (1,), source=0),)


def test_the_longest_hint_is_admitted_first_and_equal_hints_keep_their_order() -> None:
    scheduler = Scheduler(make_prompts([1, 1, 1, 1], 1, hints=[5, 9, 5, 9]), num_slots=4)
    assert [admission.prompt for admission in scheduler.next_step().admissions] == [1, 3, 0, 2]


def test_prompts_beyond_the_prefill_budget_wait_a_step() -> None:
    scheduler = Scheduler(make_prompts([6, 5, 1], 1), num_slots=4, max_prefill_tokens=10)
    # First 6, because 6 + 5 exceeds 10; then 5 and 1.
    steps = [[admission.prompt for admission in scheduler.next_step().admissions] for _ in range(3)]
    assert steps == [[0], [1, 2], []]


def test_a_prompt_longer_than_the_budget_is_read_in_chunks_while_samples_run() -> None:
    scheduler = Scheduler(make_prompts([2, 25, 6], 2), num_slots=6, max_prefill_tokens=10)
    reads, running = [], []
    for _ in range(5):
        step = scheduler.next_step()
        reads.append([(read.samples, read.begin, read.end) for read in step.reads])
        running.append(list(scheduler.running))
    # 25 = 8 + 10 + 7: both samples of the prompt hold it, and run from its last chunk on; then 6 is read at once.
    assert reads == [
        [((0, 1), 0, 2), ((2, 3), 0, 8)], [((2, 3), 8, 18)], [((2, 3), 18, 25)], [((4, 5), 0, 6)], []
    ]  # fmt: skip
    assert running == [[0, 1], [0, 1], [0, 1, 2, 3], [0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5]]


def test_a_prompt_is_copied_once_it_is_read_to_its_end() -> None:
    scheduler = Scheduler([Prompt(0, 1, (0,)), Prompt(1, 25, (1, 2))], num_slots=2, max_prefill_tokens=10)
    admitted = []
    for _ in range(5):
        admitted.append([(admission.samples, admission.source) for admission in scheduler.next_step().admissions])
        if scheduler.slots[0] == 0:
            scheduler.finish(0)
    # 25 = 9 + 10 + 6: the slot of sample 0 stays free until the step after the last part.
    assert admitted == [[((0,), None), ((1,), None)], [], [], [((2,), 0)], []]


def test_waiting_samples_keep_slots_after_running_ones_as_long_as_there_are_some() -> None:
    scheduler = Scheduler(make_prompts([1] * 5, 1), num_slots=2, num_kept=1)
    scheduler.next_step()
    scheduler.park(0, 6)
    assert scheduler.next_step().moves == (Swap(source=2, target=0),)
    assert list(scheduler.slots) == [2, 1, 0] and scheduler.num_free == 0
    scheduler.park(1, 9)
    # No answer has come yet, and sample 0 has waited for two steps: it would be read again if it had four tokens.
    assert scheduler.next_step().preempted == () and list(scheduler.running) == [2]
    step = scheduler.next_step()
    assert step.preempted == (0,) and step.admissions == (Admission(3, (3,), (2,), source=None),)
    assert list(scheduler.running) == [2, 3] and scheduler.is_parked(1) and not scheduler.is_parked(0)


def test_slots_of_waiting_samples_are_given_away_at_once_if_nothing_else_runs() -> None:
    scheduler = Scheduler(make_prompts([1] * 3, 1), num_slots=1)
    scheduler.next_step()
    scheduler.park(0, 1000)
    step = scheduler.next_step()
    assert step.preempted == (0,) and list(scheduler.running) == [1]


def test_answered_samples_run_as_soon_as_others_leave() -> None:
    scheduler = Scheduler(make_prompts([1] * 3, 1), num_slots=2, num_kept=1)
    scheduler.next_step()
    scheduler.park(0, 4)
    scheduler.next_step()
    scheduler.read(0, 4, 7)
    assert scheduler.num_waiting == 1 and scheduler.next_step().reads == ()
    scheduler.finish(1)
    assert scheduler.next_step().reads == (Read((0,), (1,), 4, 7),) and list(scheduler.running) == [2, 0]


def test_a_parked_sample_swaps_its_slot_with_the_last_running_one() -> None:
    scheduler = Scheduler(make_prompts([1, 1, 1], 1), num_slots=3)
    scheduler.next_step()
    scheduler.park(0, 4)
    assert scheduler.next_step().moves == (Swap(source=2, target=0),)
    assert (list(scheduler.running), list(scheduler.slots)) == ([2, 1], [2, 1, 0])
    scheduler.read(0, 4, 7)
    scheduler.finish(1)
    step = scheduler.next_step()
    assert step.moves == (Move(source=2, target=1),) and step.reads == (Read((0,), (1,), 4, 7),)
    assert list(scheduler.running) == [2, 0]


def test_the_slot_of_a_dropped_sample_goes_to_the_next_prompt() -> None:
    scheduler = Scheduler(make_prompts([1, 1, 1], 1), num_slots=2)
    scheduler.next_step()
    scheduler.park(0, 4)
    assert list(scheduler.slots) == [0, 1] and scheduler.next_step().admissions == ()
    scheduler.drop(0)
    assert scheduler.next_step().admissions == (Admission(2, (2,), (1,), source=None),)
    assert list(scheduler.running) == [1, 2]


@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=6),
    n=st.integers(1, 4),
    num_slots=st.integers(1, 6),
    data=st.data(),
)
def test_samples_leave_and_arrive_at_any_time(sizes: list[int], n: int, num_slots: int, data: st.DataObject) -> None:
    prompts = make_prompts(sizes, n)
    scheduler, slots = Scheduler(prompts, num_slots=num_slots, max_prefill_tokens=12), Slots(prompts)
    left = {sample: data.draw(st.integers(1, 6)) for prompt in prompts for sample in prompt.samples}
    guests = iter(range(1000, 1000 + data.draw(st.integers(0, 5))))
    while scheduler.has_work or left:
        what = data.draw(st.sampled_from(["nothing", "leave", "come"]))
        if what == "come" and (guest := next(guests, None)) is not None:
            left[guest] = data.draw(st.integers(1, 6))
            slots.sequences[guest] = [("sample", guest)] * data.draw(st.integers(1, 20))
            _welcome(scheduler, slots, guest)
        elif what == "leave" and left:
            leaver = data.draw(st.sampled_from(sorted(left)))
            if leaver in scheduler.waiting:
                scheduler.withdraw({leaver})
                del left[leaver]
            elif leaver in scheduler.slots and not scheduler.is_parked(leaver):
                scheduler.finish(scheduler.slots.index(leaver))
                del left[leaver]
        assert scheduler.num_free == num_slots - sum(sample is not None for sample in scheduler.slots)
        slots.carry_out(scheduler.next_step(), 12)
        for slot, sample in enumerate(sample for sample in scheduler.running if sample is not None):
            assert slots.held[slot] == slots.sequences[sample], "a slot holds all that its sample needs"
            slots.held[slot].append(("sample", sample))
            slots.sequences[sample].append(("sample", sample))
            left[sample] -= 1
            if not left[sample]:
                scheduler.finish(slot)
                del left[sample]
    assert not scheduler.waiting


def _welcome(scheduler: Scheduler, slots: Slots, guest: int) -> None:
    """Admit a sample with the contents of its slot; without a free slot it is queued and read again."""
    length = len(slots.sequences[guest])
    slot = scheduler.seat(guest, -guest)
    if slot is None:
        scheduler.add(Prompt(-guest, length, (guest,)))
        slots.prompts[-guest] = Prompt(-guest, length, (guest,))
    else:
        slots.held[slot] = list(slots.sequences[guest])
        scheduler.read(guest, length, length)
