"""Interface of drafters, the drafts that they propose, and checks of these.

Proposals decide how many steps a response takes, never which tokens it gets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from numbers import Integral
from typing import TYPE_CHECKING

from lightning_realloc.errors import GenerationError
from lightning_realloc.generation.core.params import is_of_kind
from lightning_realloc.generation.core.plain_decoding import SlotFollower
from lightning_realloc.generation.core.sample import Sample
from lightning_realloc.generation.core.step import NO_DRAFT, Draft

if TYPE_CHECKING:
    from lightning_realloc.generation.speculative.verify import Verification

Exchange = tuple[int, tuple[int, ...]]
"""A prompt's key, and one response to it."""


Propose = Callable[[Sequence[Sample], Sequence[int]], Sequence[Draft]]
"""As `Drafter.propose`."""


class Drafter(SlotFollower):
    """Base class of drafters: this one proposes nothing, others override the methods that they need."""

    anticipates: bool = False
    """Whether the drafter may drop tokens because of their values. Adaptive ``"reject"`` refuses such a drafter.
    A draft that ends early because no continuation is known does not count."""
    exchanges: bool = False
    """Whether the drafter learns from responses of other ranks."""
    has_listeners: bool = False
    """Whether other ranks ask for `news`; if so, the drafter keeps them until then."""
    reads_target_cache: bool = False
    """Whether drafting reads the target's keys and values. If so, samples whose prompts are being read get no draft."""
    cuda_graphs: bool = True
    """Whether forwards of a draft model may be captured and replayed."""

    def for_other_samples(self) -> Drafter:
        """Return a drafter for samples whose steps are under way at the same time.

        It begins a generation after this one and ends it before. By default it is this one, which must then know
        samples by their ids, and slots not at all.
        """
        return self

    def has_seen_prompts(self, samples: Sequence[Sample]) -> bool:
        """Return whether most prompts of these samples were seen before, which makes drafts better at once."""
        return False

    def begin(self, samples: Sequence[Sample], verification: Verification, num_slots: int) -> None:
        """Start a generation of these samples."""

    def prepare(self, running: Sequence[Sample]) -> None:
        """Prepare for the next drafts, such as by indexing new samples."""

    def num_unread(self, running: Sequence[Sample]) -> int:
        """Return the number of tokens that the drafter has to read before the next draft."""
        return 0

    def propose(self, running: Sequence[Sample], limits: Sequence[int]) -> Sequence[Draft]:
        """Return a draft for each running sample, in the order of slots.

        ``limits`` holds the most tokens of each draft; 0: the sample gets `NO_DRAFT`.
        """
        return [NO_DRAFT] * len(running)

    def finished(self, sample: Sample) -> None:
        """Learn from a sample that has its last token."""

    def end(self, *, has_failed: bool = False) -> None:
        """End the generation; ``has_failed``: it stopped with an error."""

    def news(self) -> list[Exchange]:
        """Return prompts and responses that finished on this rank since the last call."""
        return []

    def receive_news(self, news: Sequence[Exchange]) -> None:
        """Learn from prompts and responses of other ranks."""


def checked_propose(drafter: Drafter, *, vocabulary: int | None, need_laws: Callable[[], bool]) -> Propose:
    """Return a drafter's `propose` that checks its results, and that of the package's own drafters as it is.

    ``vocabulary`` is None if unknown. ``need_laws`` tells whether this generation's rule needs distributions.
    """
    if type(drafter).__module__.partition(".")[0] == __name__.partition(".")[0]:
        return drafter.propose

    def propose_checked(running: Sequence[Sample], limits: Sequence[int]) -> Sequence[Draft]:
        drafts = drafter.propose(running, limits)
        check_drafts(drafts, limits, drafter, vocabulary=vocabulary, need_laws=need_laws())
        return drafts

    return propose_checked


def check_drafts(
    drafts: Sequence[Draft], limits: Sequence[int], drafter: Drafter, *, vocabulary: int | None, need_laws: bool
) -> None:
    """Raise GenerationError for the first proposal that cannot be verified; nothing checks drafts after this.

    ``limits`` holds the most tokens of each draft. ``vocabulary`` is None if unknown.
    """
    name = type(drafter).__name__
    if not isinstance(drafts, Sequence):
        raise GenerationError(
            f"{name}.propose returned a {type(drafts).__name__}; return a list with a Draft for each running sample"
        )
    if len(drafts) != len(limits):
        raise GenerationError(
            f"{name}.propose returned {len(drafts)} drafts for {len(limits)} running samples; return one for each, "
            "Draft() where nothing is proposed"
        )
    for row, (draft, limit) in enumerate(zip(drafts, limits, strict=True)):
        if draft is NO_DRAFT:
            continue
        if not isinstance(draft, Draft):
            raise GenerationError(
                f"{name}.propose returned a {type(draft).__name__} for sample {row}; return Draft(tokens) for each"
            )
        tokens = draft.tokens
        if len(tokens) > limit:
            raise GenerationError(
                f"{name}.propose returned {len(tokens)} tokens for sample {row}, whose limit is {limit}; return "
                "draft.cut(limit)"
            )
        if not all(is_of_kind(token, Integral) for token in tokens):
            raise GenerationError(f"{name}.propose returned {list(tokens)[:8]} for sample {row}; return token ids")
        if vocabulary is not None and tokens and not 0 <= min(tokens) <= max(tokens) < vocabulary:
            raise GenerationError(
                f"{name}.propose returned tokens {min(tokens)} to {max(tokens)} for sample {row}, and the vocabulary "
                f"has {vocabulary}; draft with the target's own tokenizer"
            )
        if need_laws and len(draft.laws) != len(tokens):
            raise GenerationError(
                f"verification='reject' has to know what each drafted token was drawn from, and {name}.propose gave "
                f"{len(draft.laws)} laws for {len(tokens)} tokens; return Draft(tokens, laws=laws), or use "
                "verification='match'"
            )
