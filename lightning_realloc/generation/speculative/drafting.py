"""What might come next, without asking a model: what followed the same tokens before.

A drafter draws from the tokens that followed, with the noise that the target will draw with: where the same context was
continued in several ways, that hits the target's choice far more often than the likeliest one does.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from numbers import Integral

from lightning_realloc.errors import GenerationError
from lightning_realloc.generation.cache.kv_cache import KVCache
from lightning_realloc.generation.core.sample import Sample
from lightning_realloc.generation.core.sampling import is_of_kind
from lightning_realloc.generation.speculative.recurrences import (
    NO_TOKEN,
    ORDERS,
    Branch,
    NgramIndex,
    SharedNgramIndex,
)
from lightning_realloc.generation.speculative.verify import NO_DRAFT, Draft, Verification

_SHARES = 4
"""Steps in which shares are told apart where tokens are sorted into kinds."""

_ORDER_OF = [next((order for order in ORDERS if order <= length), 0) for length in range(ORDERS[0] + 1)]
"""The longest context that is told apart and no longer than so many tokens."""

Exchange = tuple[tuple[int, ...], tuple[int, ...]]
"""A prompt and one response to it."""
Chance = Callable[[object], float]
"""How likely a token of one kind stands, given that those before it do."""
Propose = Callable[[Sequence[Sample], Sequence[int], Chance, Sequence[float]], Sequence[Draft]]
"""As `Drafter.propose`."""
Found = tuple[str, int, Branch | None]
"""What a text is called, how long an end of a context was found in it, and where."""


class Drafter:
    """Proposes tokens: this one none, others override what they need.

    What is proposed decides how fast samples grow and never which tokens they get.
    """

    anticipates: bool = True
    """Whether a token's kind may tell of the token itself even where the verification rule must not know."""

    costs_a_forward: bool = False
    """Whether every token drafted ahead costs a forward of a model, for all samples together."""
    exchanges: bool = False
    """Whether responses made elsewhere help."""
    has_listeners: bool = False
    """Whether anybody asks for `news`, which are kept until then."""

    clock: Callable[[], float] = time.perf_counter
    """Tells seconds."""
    first_s: float = 0.0
    """Where a token costs a forward, the seconds until each draft had its first one in the last call of `propose`: what
    came since is read then, and caches are full of the target's weights."""

    reads_target_cache: bool = False
    """Whether nothing can be proposed for a sample that is being read, since the target's keys and values say what."""

    cuda_graphs: bool = True
    """Whether forwards of a model may be captured and replayed."""

    def share_cache(self, cache: KVCache) -> None:
        """The target keeps its keys and values here in the next generation.

        Who has keys and values of its own keeps them in pages, if the cache has some, and tells it now what they look
        like.
        """

    def is_acquainted(self, samples: Sequence[Sample]) -> bool:
        """Return whether most of these samples' prompts were met before, so that there is more to draft from.

        What drafts come to is told apart by that: for prompts that come again it changes all at once.
        """
        return False

    def begin(self, samples: Sequence[Sample], verification: Verification, num_slots: int) -> None:
        """A generation of these samples begins."""

    def copied(self, source: int, targets: Sequence[int], length: int) -> None:
        """The first ``length`` positions of slot ``source`` now stand in others, too."""

    def kept(self, slot: int, length: int) -> None:
        """What a slot held up to ``length`` belongs to another sample of the same prompt now, and what came is gone."""

    def swapped(self, first: int, second: int) -> None:
        """Two slots exchanged what they hold."""

    def admitted(self, slots: Sequence[int]) -> None:
        """New samples are in these slots."""

    def prepare(self, running: Sequence[Sample]) -> None:
        """Do what new samples need once, before anything is proposed for them."""

    def num_unread(self, running: Sequence[Sample]) -> int:
        """Return how many tokens have to be read before anything can be proposed."""
        return 0

    def propose(
        self, running: Sequence[Sample], limits: Sequence[int], chance: Chance, least_survivals: Sequence[float]
    ) -> list[Draft]:
        """Return a draft for each running sample, in the order of slots, of at most ``limits`` tokens.

        Or for a copy of one, to see what a draft would have come to: it was never admitted, has no slot and a
        `sample_id` of its own, and its tokens are those that the sample had some time ago.

        A draft may end where the chance that all of its tokens stand falls below its ``least_survivals``.
        """
        return [NO_DRAFT] * len(running)

    def finished(self, sample: Sample) -> None:
        """A sample has its last token."""

    def forget(self, sample: Sample) -> None:
        """Nothing more is asked for such a copy: what was kept for it may go."""

    def end(self, *, has_failed: bool = False) -> None:
        """The generation is over, or cannot go on."""

    def news(self) -> list[Exchange]:
        """Return the prompts and responses finished here since the last call."""
        return []

    def hear(self, news: Sequence[Exchange]) -> None:
        """Take in prompts and responses finished elsewhere."""


def check_drafts(
    drafts: Sequence[Draft], limits: Sequence[int], drafter: Drafter, *, vocabulary: int | None, need_laws: bool
) -> None:
    """Refuse what a drafter may not propose: behind this, nothing is asked of drafts any more.

    Args:
        drafts: What it proposed.
        limits: Most tokens of each.
        drafter: For its name.
        vocabulary: How many tokens there are; None: not known.
        need_laws: Whether the verification rule has to know what tokens were drawn from.

    Raises:
        GenerationError: naming the first one that cannot be verified.
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
                f"{len(draft.laws)} laws for {len(tokens)} tokens; return Draft(tokens, kinds, laws), or use "
                "verification='match'"
            )


class NoDrafts(Drafter):
    """Proposes nothing, so that no rule has anything to leave out."""

    anticipates = False


class _Lookup(Drafter, ABC):
    """Drafts by looking contexts up, token after token."""

    anticipates = False

    def __init__(self) -> None:
        self._verification: Verification | None = None

    def begin(self, samples: Sequence[Sample], verification: Verification, num_slots: int) -> None:
        self._verification = verification

    def propose(
        self, running: Sequence[Sample], limits: Sequence[int], chance: Chance, least_survivals: Sequence[float]
    ) -> list[Draft]:
        return [
            self._draft(sample, limit, chance, least) if limit else NO_DRAFT
            for sample, limit, least in zip(running, limits, least_survivals, strict=True)
        ]

    @abstractmethod
    def _find(self, sample: Sample, context: list[int]) -> Found:
        """Return where a sample's text, which ends with ``context``, stood before."""

    def _draft(self, sample: Sample, limit: int, chance: Chance, least_survival: float) -> Draft:
        assert self._verification is not None, "propose() before begin()"
        context = _end_of(sample)
        name, order, branch = self._find(sample, context)
        if branch is None:
            return NO_DRAFT
        draw_among, anticipates = self._verification.draw_among, self._verification.anticipates
        tokens: list[int] = []
        kinds: list[object] = []
        laws: list[tuple[int, ...]] = []
        survival = 1.0
        while branch is not None:
            followers = branch.followers
            is_sure = followers[0] == followers[-1]
            index = 0 if is_sure else draw_among(followers, sample, len(tokens))
            token = followers[index]
            kind: tuple[object, ...] = (name, _ORDER_OF[order], min(len(followers), 8))
            if anticipates:
                kind += (_SHARES if is_sure else _sureness(followers, token, index),)
            else:
                laws.append(followers)
            if least_survival:
                survival *= chance(kind)
                if survival < least_survival:
                    break
            tokens.append(token)
            kinds.append(kind)
            if len(tokens) == limit:
                break
            branch, order = branch.behind(token), min(order + 1, ORDERS[0])
            if branch is None:
                name, order, branch = self._find(sample, [*context, *tokens][-ORDERS[0] :])
        return Draft(tokens, kinds, laws[: len(tokens)])


class NgramDrafter(_Lookup):
    """Continues a sample as its own prompt and response went on before."""

    def __init__(self) -> None:
        """Know nothing yet."""
        super().__init__()
        self._own: dict[int, NgramIndex] = {}
        """By sample id: its prompt and response."""
        self._prompts: dict[int, NgramIndex] = {}
        """By index of the prompt, where several samples have the same one."""
        self._shares_prompts = False

    def begin(self, samples: Sequence[Sample], verification: Verification, num_slots: int) -> None:
        super().begin(samples, verification, num_slots)
        self._own.clear()
        self._prompts.clear()
        self._shares_prompts = len({sample.prompt_number for sample in samples}) < len(samples)

    def prepare(self, running: Sequence[Sample]) -> None:
        for sample in running:
            if sample.sample_id not in self._own:
                self._own_text(sample)

    def finished(self, sample: Sample) -> None:
        self.forget(sample)

    def forget(self, sample: Sample) -> None:
        self._own.pop(sample.sample_id, None)

    def end(self, *, has_failed: bool = False) -> None:
        self._own.clear()
        self._prompts.clear()

    def _find(self, sample: Sample, context: list[int]) -> Found:
        return "own", *self._own_text(sample).find(context)

    def _own_text(self, sample: Sample) -> NgramIndex:
        own = self._own.get(sample.sample_id)
        if own is None:
            own = self._own[sample.sample_id] = self._prompt(sample)
        num_known = own.num_tokens - len(sample.prompt)
        if num_known < len(sample.token_ids):
            own.extend(sample.token_ids[num_known:])
        return own

    def _prompt(self, sample: Sample) -> NgramIndex:
        """Return a sample's prompt, to go on with its response: copied where it is known, which is quicker."""
        known = self._prompts.get(sample.prompt_number)
        if known is None:
            known = NgramIndex()
            known.extend(sample.prompt)
            if not self._shares_prompts:
                return known
            self._prompts[sample.prompt_number] = known
        return known.copy()


class HistoryDrafter(NgramDrafter):
    """Continues a sample as other responses to its prompt went on: those of the last epochs, and finished siblings.

    Prompts are recognised by their tokens. Where no response to a prompt helps, the sample's own text may.
    """

    exchanges = True

    def __init__(self, *, responses_per_prompt: int = 16, most_tokens: int = 50_000_000) -> None:
        """Keep each prompt's last responses, ``most_tokens`` tokens altogether; prompts not seen for long go first."""
        super().__init__()
        self._responses_per_prompt = responses_per_prompt
        self._most_tokens = most_tokens
        self._num_tokens = 0
        self._responses: dict[tuple[int, ...], deque[tuple[int, ...]]] = {}
        self._news: list[Exchange] = []
        self._indexed: dict[int, SharedNgramIndex] = {}
        """By index of the prompt, for those of this generation."""
        self._unread: dict[int, list[Exchange]] = {}
        """By index of the prompt: finished siblings that are indexed once somebody looks something up there."""
        self._drafted_for: set[int] = set()
        self._asked: set[int] = set()
        """Samples of this generation that something was looked up for, and those of them for which that was done in
        their own text, too."""
        self._needs_own = True
        """Whether it was for most of the last generation: else own texts are indexed once they are asked for."""

    def is_acquainted(self, samples: Sequence[Sample]) -> bool:
        prompts = {sample.prompt_number: sample.prompt for sample in samples}
        num_known = sum(tuple(prompt) in self._responses for prompt in prompts.values())
        return 2 * num_known > len(prompts)

    def begin(self, samples: Sequence[Sample], verification: Verification, num_slots: int) -> None:
        super().begin(samples, verification, num_slots)
        self._drafted_for.clear()
        self._asked.clear()

    def prepare(self, running: Sequence[Sample]) -> None:
        for sample in running:
            if sample.prompt_number in self._unread:
                self._siblings(sample)
        if self._needs_own:
            super().prepare(running)

    def finished(self, sample: Sample) -> None:
        super().finished(sample)
        exchange = tuple(sample.prompt), tuple(sample.token_ids)
        if self.has_listeners:
            self._news.append(exchange)
        self._keep(exchange)
        if sample.prompt_number in self._indexed:
            self._unread.setdefault(sample.prompt_number, []).append(exchange)

    def news(self) -> list[Exchange]:
        news, self._news = self._news, []
        return news

    def hear(self, news: Sequence[Exchange]) -> None:
        for exchange in news:
            self._keep(exchange)

    def _keep(self, exchange: Exchange) -> None:
        prompt, response = exchange
        kept = self._responses.pop(prompt, None) or deque()  # put back at the end: the prompt seen last
        self._responses[prompt] = kept
        kept.append(response)
        self._num_tokens += len(response)
        if len(kept) > self._responses_per_prompt:
            self._num_tokens -= len(kept.popleft())
        while self._num_tokens > self._most_tokens and len(self._responses) > 1:
            oldest = next(iter(self._responses))
            self._num_tokens -= sum(map(len, self._responses.pop(oldest)))

    def end(self, *, has_failed: bool = False) -> None:
        super().end(has_failed=has_failed)
        self._indexed.clear()
        self._unread.clear()
        if self._drafted_for:
            self._needs_own = 2 * len(self._asked) > len(self._drafted_for)

    def _find(self, sample: Sample, context: list[int]) -> Found:
        self._drafted_for.add(sample.sample_id)
        order, branch = self._siblings(sample).find(context)
        if order == ORDERS[0]:
            return "history", order, branch
        self._asked.add(sample.sample_id)
        own_order, own_branch = self._own_text(sample).find(context)
        return ("own", own_order, own_branch) if own_order > order else ("history", order, branch)

    def _siblings(self, sample: Sample) -> SharedNgramIndex:
        siblings = self._indexed.get(sample.prompt_number)
        if siblings is None:
            siblings = self._indexed[sample.prompt_number] = SharedNgramIndex()
            for response in self._responses.get(tuple(sample.prompt), ()):
                siblings.add(sample.prompt[-ORDERS[0] :], response)
        for prompt, response in self._unread.pop(sample.prompt_number, ()):
            siblings.add(prompt[-ORDERS[0] :], response)
        return siblings


def _end_of(sample: Sample) -> list[int]:
    """Return a sample's last tokens, as many as tell contexts apart."""
    stop = sample.position + 1
    tokens = sample.tokens(max(stop - ORDERS[0], 0), stop)
    return [NO_TOKEN] * (ORDERS[0] - len(tokens)) + tokens


def _sureness(followers: Sequence[int], token: int, index: int) -> int:
    """Return how far a draw is from another token, in steps of a share of what followed; there are others."""
    seen = len(followers)
    first, stop = bisect_left(followers, token), bisect_right(followers, token)
    to_others = [index - first] * (first > 0) + [stop - 1 - index] * (stop < seen)
    return int(_SHARES * min(to_others) / seen)
