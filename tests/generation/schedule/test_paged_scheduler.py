"""Invariants of the paged scheduler, checked by simulating its steps on pages that record their tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import groupby

from hypothesis import given
from hypothesis import strategies as st

from lightning_realloc.batch.model_input import ModelInput
from lightning_realloc.generation.cache.page_table import PageTables
from lightning_realloc.generation.core.sample import Sample
from lightning_realloc.generation.schedule.paged_scheduler import PagedScheduler
from lightning_realloc.generation.schedule.slot_plan import Move, Prompt, Step
from tests.generation.schedule.test_scheduler import Pause

PAGE_SIZE = 4


@dataclass(frozen=True)
class Setting:
    """Prompts, responses and limits of one simulated call."""

    prompts: list[list[int]]
    n: int
    lengths: list[int]
    """Tokens of each sample's response."""
    most: int
    """Maximum tokens of a response."""
    num_slots: int = 4
    num_kept: int = 0
    num_pages: int = 20
    num_ahead: int = 0
    num_spare: int = 32
    max_prefill_tokens: int = 100


class Play:
    """A call without a model; pages hold token ids instead of keys and values."""

    def __init__(self, setting: Setting, pauses: dict[int, Pause] | None = None) -> None:
        self.setting = setting
        n = setting.n
        self.samples = [Sample(index, index // n, ModelInput(tuple(setting.prompts[index // n])), setting.most, 0)
                        for index in range(len(setting.prompts) * n)]  # fmt: skip
        num_pages = max(setting.num_pages, *(-(-sample.max_length // PAGE_SIZE) for sample in self.samples))
        self.tables = PageTables(num_pages, PAGE_SIZE, num_slots=setting.num_slots + setting.num_kept)
        queue = [Prompt(index, len(prompt) - 1, tuple(range(index * n, (index + 1) * n)))
                 for index, prompt in enumerate(setting.prompts)]  # fmt: skip
        self.scheduler = PagedScheduler(
            queue, samples=self.samples, tables=self.tables, num_slots=setting.num_slots,
            num_kept=setting.num_kept, num_ahead=setting.num_ahead, num_spare=setting.num_spare,
            max_prefill_tokens=setting.max_prefill_tokens,
        )  # fmt: skip
        self.held: dict[tuple[int, int], int] = {}
        self.pauses = dict(pauses or {})
        self.waiting: dict[int, Pause] = {}
        self.answered: set[int] = set()
        """Samples with a slot that do not run on after their answer yet."""
        self.admitted: list[int] = []
        """Samples that hold a slot, in order of admission."""
        self.num_preempted = self.num_read = self.num_held = 0
        self.history: list[list[int]] = []

    def run(self) -> Play:
        """Run steps until all samples have finished."""
        while self.scheduler.has_work or self.waiting:
            self._answer()
            step = self.scheduler.next_step()
            self._carry_out(step)
            running = [index for index in self.scheduler.running if index is not None]
            assert len(running) == len(self.scheduler.running), "running samples fill the first slots"
            self._check_progress(step, running)
            self.history.append(running)
            for slot, index in enumerate(running):
                self._take_tokens(slot, index)
            assert len(self.history) < 3000, "this does not come to an end"
        for sample, length in zip(self.samples, self.setting.lengths, strict=True):
            assert length <= len(sample.token_ids) <= length + self.setting.num_ahead
        assert self.tables.num_free == self.tables.num_pages
        return self

    def _answer(self) -> None:
        for index, pause in list(self.waiting.items()):
            self.waiting[index] = replace(pause, num_steps=pause.num_steps - 1)
            if pause.num_steps:
                continue
            del self.waiting[index]
            sample, scheduler = self.samples[index], self.scheduler
            room = sample.max_new_tokens - len(sample.token_ids) - 1
            if room:
                sample.extend(ModelInput((index + 50,) * min(pause.num_tokens, room)))
            if not scheduler.is_parked(index):
                scheduler.add(Prompt(sample.prompt_index, sample.position, (index,)))
            else:
                scheduler.read(index, sample.num_read, sample.position)
                self.answered.add(index)

    def _carry_out(self, step: Step) -> None:
        for index in step.preempted:
            self.samples[index].num_read = 0
            self.admitted.remove(index)
            self.answered.discard(index)
            self.num_preempted += 1
        for admission in step.admissions:
            held = admission.num_held
            for index, slot in zip(admission.samples, admission.slots, strict=True):
                if admission.source is not None:
                    held = len(self.samples[index].prompt) - 1
                    self._copy(admission.source, slot, held)
                self.samples[index].num_read = held
            self.admitted += admission.samples
            self.num_held += held * (admission.source is None)
        for move in step.moves:
            assert not (isinstance(move, Move) and self.tables.tables[move.target]), "nobody needs the target"
            self.tables.swap(move.source, move.target)
        assert sum(read.end - read.begin for read in step.reads) <= self.setting.max_prefill_tokens
        for read in step.reads:
            self.num_read += read.end - read.begin
            for index, slot in zip(read.samples, read.slots, strict=True):
                assert self.samples[index].num_read == read.begin
                self._write(slot, read.begin, self.samples[index].tokens(read.begin, read.end))
                self.samples[index].num_read = read.end
        for slot, index in enumerate(self.scheduler.slots):  # a forward writes all of this before it reads any of it
            if index is not None:
                num_read = self.samples[index].num_read
                assert self._contents(slot, num_read) == self.samples[index].tokens(0, num_read)

    def _copy(self, source: int, target: int, length: int) -> None:
        tables = self.tables.tables
        for old, new in list(zip(tables[source], tables[target], strict=False))[: self.tables.pages_for(length)]:
            for offset in range(PAGE_SIZE):
                self.held[new, offset] = self.held.get((old, offset), -1)

    def _write(self, slot: int, begin: int, tokens: list[int]) -> None:
        for place, token in enumerate(tokens, start=begin):
            self.held[self.tables.tables[slot][place // PAGE_SIZE], place % PAGE_SIZE] = token

    def _contents(self, slot: int, length: int) -> list[int]:
        table = self.tables.tables[slot]
        return [self.held[table[place // PAGE_SIZE], place % PAGE_SIZE] for place in range(length)]

    def _check_progress(self, step: Step, running: list[int]) -> None:
        reading = {index for read in step.reads for index in read.samples}
        self.answered -= {*running, *reading}
        assert running or reading or (self.waiting and not self.scheduler.num_waiting), "somebody gets further"
        assert len({*running, *reading}) <= self.setting.num_slots
        assert len(self.scheduler.slots) <= self.setting.num_slots + self.setting.num_kept
        busy = [index for index in self.admitted if index not in self.waiting and index not in self.answered]
        is_full = sum(read.end - read.begin for read in step.reads) == self.setting.max_prefill_tokens
        assert not self.answered or is_full or len(busy) == self.setting.num_slots, "answered samples go on"
        assert not busy or busy[0] in {*running, *reading} or is_full, "who was admitted first gets further"

    def _take_tokens(self, slot: int, index: int) -> None:
        """Write the last token and some drafted ones; accept a number of drafts that depends on the sample's index."""
        sample, setting = self.samples[index], self.setting
        room = sample.max_new_tokens - len(sample.token_ids) - 1
        ahead = min(setting.num_ahead, room)
        own = self.tables.tables[slot][sample.position // PAGE_SIZE :]
        others = {page for other, table in enumerate(self.tables.tables) if other != slot for page in table}
        assert not others & set(own), "nobody else has a page that is written into"
        drafted = [index + 60 + place for place in range(ahead)]
        self._write(slot, sample.position, [sample.last_token, *drafted])
        stands = min(ahead, index % 3)
        for token in (*drafted[:stands], index + 70):
            sample.append(token, 0.0)
        if len(sample.token_ids) >= setting.lengths[index]:
            self.scheduler.finish(slot)
            self.admitted.remove(index)
        elif index in self.pauses and len(sample.token_ids) >= self.pauses[index].after:
            self.scheduler.park(slot, sample.num_read)
            self.waiting[index] = self.pauses.pop(index)


@st.composite
def settings(draw: st.DrawFn) -> Setting:
    """Draw prompts with common prefixes, and few pages."""
    n, most = draw(st.integers(1, 4)), draw(st.integers(1, 30))
    common = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    prompts = [
        common[: draw(st.integers(0, 10))] + [20 + draw(st.integers(0, 2))] * draw(st.integers(1, 6))
        for _ in range(draw(st.integers(1, 6)))
    ]
    total = n * len(prompts)
    return Setting(
        prompts, n, draw(st.lists(st.integers(1, most), min_size=total, max_size=total)), most,
        num_slots=draw(st.integers(1, 6)), num_kept=draw(st.integers(0, 6)), num_pages=draw(st.integers(1, 24)),
        num_ahead=draw(st.integers(0, 5)), num_spare=draw(st.sampled_from([0, 4, 32])),
        max_prefill_tokens=draw(st.integers(1, 30)),
    )  # fmt: skip


PAUSES = st.dictionaries(
    st.integers(0, 23),
    st.builds(Pause, after=st.integers(1, 20), num_steps=st.integers(0, 6), num_tokens=st.integers(1, 12)),
)


@given(setting=settings(), pauses=PAUSES)
def test_every_sample_finishes_on_any_number_of_pages_that_holds_one_sample(
    setting: Setting, pauses: dict[int, Pause]
) -> None:
    lengths = [setting.most if index in pauses else length for index, length in enumerate(setting.lengths)]
    Play(replace(setting, lengths=lengths), pauses).run()


def test_the_sample_admitted_last_is_preempted_first_and_resumed_first() -> None:
    # Prompts of four tokens, responses of up to 60: 1 page at once and 8 more within the next 32 steps. Samples 0 and 1
    # each need 1 + 8 of the 20 pages; sample 2 waits. Both hold 10 pages before the step that reads position 40.
    setting = Setting([[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]], 1, [44, 50, 10], 60, num_slots=3, num_pages=20)
    play = Play(setting).run()
    assert [(sorted(running), len(list(steps))) for running, steps in groupby(play.history, key=sorted)] == [
        ([0, 1], 37), ([0], 7), ([1], 13), ([2], 10)
    ]  # fmt: skip
    assert play.num_preempted == 1
    # Sample 1 finds its first 8 pages: the last two went to sample 0. It reads 8 of 40 positions again.
    assert (play.num_read, play.num_held) == (3 + 3 + 3 + 8, 32)


def test_samples_do_not_preempt_each_other_in_turn() -> None:
    prompts = [[index] * 5 for index in range(12)]
    play = Play(Setting(prompts, 2, [40] * 24, 40, num_slots=24, num_pages=40)).run()
    # Eleven pages each: three or four run at a time, and are preempted once, when all are half way.
    assert play.num_preempted <= 24
    assert len(play.history) <= 24 * 40 / 3


def test_pages_that_prompts_have_in_common_are_read_once() -> None:
    common = list(range(30, 41))
    play = Play(Setting([[*common, index, index] for index in range(5)], 2, [3] * 10, 3, num_slots=10)).run()
    # Prompts have 12 positions to read (a row reads the last token). Two pages are the same: prompts 1 to 4 find them.
    assert (play.num_read, play.num_held) == (12 + 4 * 4, 4 * 8)


def test_samples_admitted_later_copy_a_partial_page_from_a_running_one() -> None:
    play = Play(Setting([[1, 2, 3, 4, 5, 6, 7]], 3, [2, 9, 5], 9, num_slots=2)).run()
    assert play.num_read == 6 and play.num_held == 0  # once, by the first two
    assert play.history[2] == [2, 1]


def test_a_parked_sample_is_preempted_before_the_last_running_one() -> None:
    # Sample 0 waits with 6 of 18 pages from its 20th token on; sample 1 needs its 13th page for its 46th.
    setting = Setting([[1, 2, 3, 4], [5, 6, 7, 8]], 1, [44, 55], 60, num_slots=2, num_pages=18)
    play = Play(setting, {0: Pause(after=20, num_steps=60, num_tokens=4)}).run()
    assert play.num_preempted == 1
    assert play.history[20:55] == [[1]] * 35
    # Sample 1 reaches 58 positions, 15 pages: it took the unfinished page of sample 0, and two of its five full ones.
    assert play.num_held == 12


def test_a_sample_that_is_preempted_while_it_is_read_offers_no_unread_pages() -> None:
    # One position is read per step, and four pages hold the longest sample alone.
    prompts = [[20, 20], [20], [20], [20, 20, 20, 20, 20], [20]]
    setting = Setting(prompts, 2, [8] + [1] * 9, 8, num_slots=2, num_pages=1, num_spare=0, max_prefill_tokens=1)
    play = Play(setting, {0: Pause(after=1, num_steps=0, num_tokens=1)}).run()
    assert play.num_preempted > 0
