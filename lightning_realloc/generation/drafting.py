"""What might come next, without asking a model: what followed the same tokens before.

A drafter draws from the tokens that followed, with the noise that the target will draw with: where the same context was
continued in several ways, that hits the target's choice far more often than the likeliest one does.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Sequence

from lightning_realloc.generation.paged_cache import PagedCache
from lightning_realloc.generation.samples import Sample
from lightning_realloc.generation.verification import NO_DRAFT, Draft, Verification

ORDERS = (8, 4, 2, 1)
"""Lengths of context that are looked up, the longest first."""
_MOST_FOLLOWERS = 64
_MOST_NEWS = 65_536
_SHARES = 4
"""Steps in which shares are told apart where tokens are sorted into kinds."""

Exchange = tuple[tuple[int, ...], tuple[int, ...]]
"""A prompt and one response to it."""
Chance = Callable[[object], float]
"""How likely a token of one kind stands, given that those before it do."""


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

    def share_pages(self, cache: PagedCache) -> None:
        """Keep keys and values, if any, in the pages of this cache, and tell it now what they look like."""

    def begin(self, samples: Sequence[Sample], verification: Verification, num_slots: int) -> None:
        """A generation of these samples begins."""

    def copied(self, source: int, targets: Sequence[int], length: int) -> None:
        """The first ``length`` positions of slot ``source`` now stand in others, too."""

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

        A draft may end where the chance that all of its tokens stand falls below its ``least_survivals``.
        """
        return [NO_DRAFT] * len(running)

    def finished(self, sample: Sample) -> None:
        """A sample has its last token."""

    def end(self) -> None:
        """The generation is over."""

    def news(self) -> list[Exchange]:
        """Return the prompts and responses finished here since the last call."""
        return []

    def hear(self, news: Sequence[Exchange]) -> None:
        """Take in prompts and responses finished elsewhere."""


class NoDrafts(Drafter):
    """Proposes nothing, so that no rule has anything to leave out."""

    anticipates = False


class Followers:
    """Which tokens followed contexts of the lengths `ORDERS`, over any number of sequences."""

    def __init__(self) -> None:
        """Hold nothing yet."""
        # Tuples of numbers, which the garbage collector stops to visit: of lists there would be hundreds of thousands.
        self._seen: dict[tuple[int, ...], tuple[int, ...]] = {}

    def add(self, tokens: Sequence[int], begin: int) -> None:
        """Take what ``tokens[begin:]`` say, each after those before it."""
        seen, first = self._seen, max(begin - ORDERS[0], 0)
        own = tuple(tokens[first:])  # whose slices can be looked up as they are
        for place in range(max(begin, 1) - first, len(own)):
            follower = own[place]
            for order in ORDERS:
                if order > place:
                    continue
                context = own[place - order : place]
                known = seen.get(context)
                if known is None:
                    seen[context] = (follower,)
                elif len(known) < _MOST_FOLLOWERS:
                    index = bisect_left(known, follower)
                    seen[context] = (*known[:index], follower, *known[index:])

    def of(self, context: tuple[int, ...]) -> tuple[int, ...] | None:
        """Return what followed a context, sorted; None where it was not seen."""
        return self._seen.get(context)


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
    def _followers(self, sample: Sample) -> Sequence[tuple[str, Followers]]:
        """Return where to look a sample's context up, the best source first, each with its name."""

    def _draft(self, sample: Sample, limit: int, chance: Chance, least_survival: float) -> Draft:
        assert self._verification is not None, "propose() before begin()"
        sources = self._followers(sample)
        context = _context_of(sample)
        tokens: list[int] = []
        kinds: list[object] = []
        laws: list[tuple[int, ...]] = []
        survival = 1.0
        while len(tokens) < limit:
            source, order, followers = _best(sources, context)
            if not followers:
                break
            index = self._verification.draw_among(followers, sample, len(tokens))
            token = followers[index]
            kind: tuple[object, ...] = (source, order, min(len(followers), 8))
            if self._verification.anticipates:
                kind += (_sureness(followers, token, index),)
            else:
                laws.append(followers)
            survival *= chance(kind)
            if survival < least_survival:
                break
            tokens.append(token)
            kinds.append(kind)
            context = (*context[-ORDERS[0] + 1 :], token)
        return Draft(tokens, kinds, laws[: len(tokens)])


class NgramDrafter(_Lookup):
    """Continues a sample as its own prompt and response went on before."""

    def __init__(self) -> None:
        """Know nothing yet."""
        super().__init__()
        self._own: dict[int, tuple[Followers, list[int]]] = {}

    def begin(self, samples: Sequence[Sample], verification: Verification, num_slots: int) -> None:
        super().begin(samples, verification, num_slots)
        self._own.clear()

    def prepare(self, running: Sequence[Sample]) -> None:
        for sample in running:
            if sample.sample_id not in self._own:
                self._followers(sample)

    def finished(self, sample: Sample) -> None:
        self._own.pop(sample.sample_id, None)

    def end(self) -> None:
        self._own.clear()

    def _followers(self, sample: Sample) -> Sequence[tuple[str, Followers]]:
        followers, tokens = self._own.setdefault(sample.sample_id, (Followers(), []))
        known = len(tokens)
        if not known:
            tokens.extend(sample.prompt)
        tokens.extend(sample.token_ids[len(tokens) - len(sample.prompt) :])
        followers.add(tokens, known)
        return (("own", followers),)


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
        self._news: deque[Exchange] = deque(maxlen=_MOST_NEWS)
        self._indexed: dict[int, Followers] = {}
        """By index of the prompt, for those of this generation."""
        self._unread: dict[int, list[Exchange]] = {}
        """By index of the prompt: finished siblings that are indexed once somebody looks something up there."""

    def prepare(self, running: Sequence[Sample]) -> None:
        for sample in running:
            if sample.prompt_index in self._unread:
                self._siblings(sample)
        super().prepare(running)

    def finished(self, sample: Sample) -> None:
        super().finished(sample)
        exchange = tuple(sample.prompt), tuple(sample.token_ids)
        self._news.append(exchange)
        self._keep(exchange)
        if sample.prompt_index in self._indexed:
            self._unread.setdefault(sample.prompt_index, []).append(exchange)

    def news(self) -> list[Exchange]:
        news = list(self._news)
        self._news.clear()
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

    def end(self) -> None:
        super().end()
        self._indexed.clear()
        self._unread.clear()

    def _followers(self, sample: Sample) -> Sequence[tuple[str, Followers]]:
        return (("history", self._siblings(sample)), *super()._followers(sample))

    def _siblings(self, sample: Sample) -> Followers:
        siblings = self._indexed.get(sample.prompt_index)
        if siblings is None:
            siblings = self._indexed[sample.prompt_index] = Followers()
            for response in self._responses.get(tuple(sample.prompt), ()):
                _index(siblings, sample.prompt, response)
        for exchange in self._unread.pop(sample.prompt_index, ()):
            _index(siblings, *exchange)
        return siblings


def _index(followers: Followers, prompt: Sequence[int], response: Sequence[int]) -> None:
    begin = tuple(prompt[-ORDERS[0] :])
    followers.add((*begin, *response), len(begin))


def _context_of(sample: Sample) -> tuple[int, ...]:
    taken = sample.token_ids[-ORDERS[0] :]
    return (*sample.prompt[len(taken) - ORDERS[0] :], *taken) if len(taken) < ORDERS[0] else tuple(taken)


def _best(sources: Sequence[tuple[str, Followers]], context: tuple[int, ...]) -> tuple[str, int, tuple[int, ...]]:
    """Return the name, order and followers of the longest context; of equals that of the first source."""
    for order in ORDERS:
        if order <= len(context):
            own = context[-order:]
            for name, followers in sources:
                found = followers.of(own)
                if found is not None:
                    return name, order, found
    return "", 0, ()


def _sureness(followers: Sequence[int], token: int, index: int) -> int:
    """Return how far a draw is from another token, in steps of a share of what followed; one more for the only one."""
    seen = len(followers)
    first, stop = bisect_left(followers, token), bisect_right(followers, token)
    if stop - first == seen:
        return _SHARES
    to_others = [index - first] * (first > 0) + [stop - 1 - index] * (stop < seen)
    return int(_SHARES * min(to_others) / seen)
