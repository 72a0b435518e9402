"""Drafts by n-gram look-up: the tokens that followed the same context before.

A drafter draws among these tokens with the random number that the target will draw with. Where a context has several
continuations, the target accepts such a draw far more often than the likeliest token.

`NgramIndex` finds matches by hash chains, as compressors do (RFC 1951, section 4). It chains every place of a text to
the last place with the same three tokens before it, and to the last one with the same token before it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from lightning_realloc.generation.core.sample import Sample
from lightning_realloc.generation.core.step import NO_DRAFT, Draft
from lightning_realloc.generation.speculative.drafter import Drafter, Exchange
from lightning_realloc.generation.speculative.verify import Verification

ORDERS = (8, 4, 3, 2, 1)
"""Numbers of last tokens that are compared, the longest first: a match of 7 tokens counts as one of 4."""
_STEM = 3
"""Tokens before a place that chained places have in common."""
_MOST_PLACES = 32
"""Places of a chain that are read, the latest first. Larger: slower, with hardly other drafts."""
_MOST_FOUND = 64
"""Contexts whose places are cached, since samples of a prompt look up the same ones. Larger: more memory."""
NO_TOKEN = -1
"""Separator of texts; no context crosses it."""


class NgramIndex:
    """Index of texts by the tokens before each place."""

    def __init__(self) -> None:
        """Start without a text."""
        self._tokens = [NO_TOKEN] * ORDERS[0]  # before the first token, so that there are contexts of every length
        # Only numbers and tuples of numbers, which the garbage collector does not visit; 0: no such place.
        self._after_stem: dict[tuple[int, ...], int] = {}
        """Three tokens -> the last place after them."""
        self._previous_after_stem = [0] * ORDERS[0]
        """Place -> the previous place after the same three tokens."""
        self._after_token: dict[int, int] = {}
        """Token -> the last place after it."""
        self._previous_after_token = [0] * ORDERS[0]
        """Place -> the previous place after the same token."""

    def copy(self) -> NgramIndex:
        """Return a copy, to continue with another text."""
        other = NgramIndex()
        other._tokens = self._tokens.copy()
        other._after_stem, other._previous_after_stem = self._after_stem.copy(), self._previous_after_stem.copy()
        other._after_token, other._previous_after_token = self._after_token.copy(), self._previous_after_token.copy()
        return other

    @property
    def num_tokens(self) -> int:
        """Number of tokens, if the index holds one text."""
        return len(self._tokens) - ORDERS[0]

    def begin(self, context: Sequence[int]) -> None:
        """Begin another text, which follows a context of its own."""
        self._tokens += (NO_TOKEN, *context)
        places = [0] * (1 + len(context))
        self._previous_after_stem += places
        self._previous_after_token += places

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the last text."""
        after_stem, previous_after_stem = self._after_stem, self._previous_after_stem
        after_token, previous_after_token = self._after_token, self._previous_after_token
        first, second, third = self._tokens[-_STEM:]
        for place, token in enumerate(tokens, start=len(self._tokens)):
            stem = first, second, third
            previous_after_stem.append(after_stem.get(stem, 0))
            after_stem[stem] = place
            previous_after_token.append(after_token.get(third, 0))
            after_token[third] = place
            first, second, third = second, third, token
        self._tokens += tokens

    def find(self, context: list[int]) -> tuple[int, Branch | None]:
        """Return the length of the longest known end of ``context``, one of `ORDERS`, and the places after it.

        Return 0 and None if no end is known. ``context`` has as many tokens as the largest of `ORDERS`.
        """
        own = self._tokens
        if place := self._after_stem.get(tuple(context[-_STEM:]), 0):
            order, places = _STEM, _chain(place, self._previous_after_stem)
            for longer in (4, 8):
                end = context[-longer:]
                matching = [place for place in places if own[place - longer : place] == end]
                if not matching:
                    break
                order, places = longer, matching
            return order, Branch(own, places)
        if place := self._after_token.get(context[-1], 0):
            places = _chain(place, self._previous_after_token)
            matching = [place for place in places if own[place - 2] == context[-2]]
            return (2, Branch(own, matching)) if matching else (1, Branch(own, places))
        return 0, None


class Branch:
    """Places after the same tokens, and the tokens at these places."""

    __slots__ = ("_known", "_places", "_tokens", "followers")

    def __init__(self, tokens: list[int], places: list[int]) -> None:
        """Read these places of the texts, at least one."""
        self._tokens = tokens
        self._places = places
        self._known: dict[int, Branch | None] | None = None
        self.followers: tuple[int, ...] = (
            (tokens[places[0]],) if len(places) == 1 else tuple(sorted([tokens[place] for place in places]))
        )
        """The tokens at these places, sorted."""

    def after(self, token: int) -> Branch | None:
        """Return the places after ``token`` at these places, without ends of texts; None if there are none.

        They are cached, since samples with the same context mostly continue alike.
        """
        if self._known is None:
            self._known = {}
        if token not in self._known:
            own, stop = self._tokens, len(self._tokens) - 1
            here = [place for place in self._places if own[place] == token and place < stop]
            places = [place + 1 for place in here if own[place + 1] != NO_TOKEN]
            self._known[token] = Branch(own, places) if places else None
        return self._known[token]


class SharedNgramIndex(NgramIndex):
    """Index that many samples share, with a cache of the latest contexts."""

    def __init__(self) -> None:
        """Hold no text."""
        super().__init__()
        self._found: dict[tuple[int, ...], tuple[int, Branch | None]] = {}
        """Context -> result of `find`; emptied when a text is added."""

    def add(self, context: Sequence[int], text: Sequence[int]) -> None:
        """Add a text after its context."""
        self._found.clear()
        self.begin(context)
        self.extend(text)

    def find(self, context: list[int]) -> tuple[int, Branch | None]:
        key = tuple(context)
        found = self._found.get(key)
        if found is None:
            if len(self._found) >= _MOST_FOUND:
                self._found.clear()
            found = self._found[key] = super().find(context)
        return found


def _chain(place: int, before: Sequence[int]) -> list[int]:
    """Return a place and the places chained to it, the latest first."""
    places: list[int] = []
    while place and len(places) < _MOST_PLACES:
        places.append(place)
        place = before[place]
    return places


class NgramDrafter(Drafter):
    """Drafts token after token by look-up of the context in the sample's own prompt and response."""

    def __init__(self) -> None:
        """Start without a text."""
        self._verification: Verification | None = None
        self._own: dict[int, NgramIndex] = {}
        """Sample id -> index of its prompt and response."""
        self._prompts: dict[int, NgramIndex] = {}
        """Number of a prompt that several samples share -> its index."""
        self._shares_prompts = False

    def begin(self, samples: Sequence[Sample], verification: Verification, num_slots: int) -> None:
        self._verification = verification
        self._shares_prompts = len({sample.prompt_number for sample in samples}) < len(samples)

    def prepare(self, running: Sequence[Sample]) -> None:
        for sample in running:
            if sample.sample_id not in self._own:
                self._own_text(sample)

    def propose(self, running: Sequence[Sample], limits: Sequence[int]) -> list[Draft]:
        return [self._draft(sample, limit) if limit > 0 else NO_DRAFT
                for sample, limit in zip(running, limits, strict=True)]  # fmt: skip

    def finished(self, sample: Sample) -> None:
        self._own.pop(sample.sample_id, None)

    def end(self, *, has_failed: bool = False) -> None:
        self._own.clear()
        self._prompts.clear()

    def _draft(self, sample: Sample, limit: int) -> Draft:
        assert self._verification is not None, "propose() before begin()"
        context = _end_of(sample)
        branch = self._find(sample, context)
        draw_among, need_laws = self._verification.draw_among, self._verification.needs_laws
        tokens: list[int] = []
        laws: list[tuple[int, ...]] = []
        while branch is not None:
            followers = branch.followers
            is_certain = followers[0] == followers[-1]
            token = followers[0 if is_certain else draw_among(followers, sample, len(tokens))]
            tokens.append(token)
            if need_laws:
                laws.append(followers)
            if len(tokens) == limit:
                break
            branch = branch.after(token)
            if branch is None:
                branch = self._find(sample, [*context, *tokens][-ORDERS[0] :])
        return Draft(tokens, laws=laws) if tokens else NO_DRAFT

    def _find(self, sample: Sample, context: list[int]) -> Branch | None:
        """Return the places after earlier occurrences of ``context``; None if there are none.

        ``context`` ends with the sample's last tokens, followed by those that the draft holds already.
        """
        return self._own_text(sample).find(context)[1]

    def _own_text(self, sample: Sample) -> NgramIndex:
        own = self._own.get(sample.sample_id)
        if own is None:
            own = self._own[sample.sample_id] = self._prompt(sample)
        num_known = own.num_tokens - len(sample.prompt)
        if num_known < len(sample.token_ids):
            own.extend(sample.token_ids[num_known:])
        return own

    def _prompt(self, sample: Sample) -> NgramIndex:
        """Return an index of a sample's prompt. Samples that share the prompt get copies, which is faster."""
        known = self._prompts.get(sample.prompt_number)
        if known is None:
            known = NgramIndex()
            known.extend(sample.prompt)
            if not self._shares_prompts:
                return known
            self._prompts[sample.prompt_number] = known
        return known.copy()


class HistoryDrafter(NgramDrafter):
    """Drafts by look-up in other responses to the sample's prompt: those of earlier epochs, and finished siblings.

    It recognises prompts, and images of answers, by their keys. If the sample's own text matches a longer context, it
    looks there instead.
    """

    exchanges = True

    def __init__(self, *, responses_per_prompt: int = 16, most_tokens: int = 50_000_000) -> None:
        """Keep the last responses to each prompt, ``most_tokens`` tokens in total; the oldest prompts go first."""
        super().__init__()
        self._responses_per_prompt = responses_per_prompt
        self._most_tokens = most_tokens
        self._num_tokens = 0
        self._responses: dict[int, deque[tuple[int, ...]]] = {}
        """Prompt key -> responses."""
        self._news: list[Exchange] = []
        self._indexed: dict[int, SharedNgramIndex] = {}
        """Key of prompt and images in this generation -> index of the responses to them."""
        self._unread: dict[int, list[tuple[int, ...]]] = {}
        """The same key -> finished siblings, indexed before the next look-up."""
        self._drafted_for: set[int] = set()
        """Ids of samples with a look-up in this generation."""
        self._asked: set[int] = set()
        """Ids of samples with a look-up in their own text in this generation."""
        self._needs_own = True
        """Whether most samples of the last generation needed their own text. If not, it is indexed on demand."""

    def has_seen_prompts(self, samples: Sequence[Sample]) -> bool:
        keys = {sample.input.prompt_key for sample in samples}
        return 2 * sum(key in self._responses for key in keys) > len(keys)

    def prepare(self, running: Sequence[Sample]) -> None:
        for sample in running:
            if sample.context_key() in self._unread:
                self._siblings(sample)
        if self._needs_own:
            super().prepare(running)

    def finished(self, sample: Sample) -> None:
        super().finished(sample)
        for exchange in _exchanges(sample):
            if self.has_listeners:
                self._news.append(exchange)
            self._keep(exchange)
            key, response = exchange
            if key in self._indexed:
                self._unread.setdefault(key, []).append(response)

    def news(self) -> list[Exchange]:
        news, self._news = self._news, []
        return news

    def receive_news(self, news: Sequence[Exchange]) -> None:
        for exchange in news:
            self._keep(exchange)

    def _keep(self, exchange: Exchange) -> None:
        key, response = exchange
        kept = self._responses.pop(key, None) or deque()  # put back at the end: the prompt seen last
        self._responses[key] = kept
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
        self._drafted_for.clear()
        self._asked.clear()

    def _find(self, sample: Sample, context: list[int]) -> Branch | None:
        self._drafted_for.add(sample.sample_id)
        order, branch = self._siblings(sample).find(context)
        if order == ORDERS[0]:
            return branch
        self._asked.add(sample.sample_id)
        own_order, own_branch = self._own_text(sample).find(context)
        return own_branch if own_order > order else branch

    def _siblings(self, sample: Sample) -> SharedNgramIndex:
        key = sample.context_key()
        before = sample.inputs[-1][1].token_ids[-ORDERS[0] :]
        siblings = self._indexed.get(key)
        if siblings is None:
            siblings = self._indexed[key] = SharedNgramIndex()
            for response in self._responses.get(key, ()):
                siblings.add(before, response)
        for response in self._unread.pop(key, ()):
            siblings.add(before, response)
        return siblings


def _exchanges(sample: Sample) -> list[Exchange]:
    """Return the parts of a response before, between and after images, with the key of what each follows."""
    begins = [0, *(one.begin + len(one.input.token_ids) for one in sample.answers)]
    ends = [*(one.begin for one in sample.answers), len(sample.token_ids)]
    return [
        (sample.context_key(number), tuple(sample.token_ids[begin:end]))
        for number, (begin, end) in enumerate(zip(begins, ends, strict=True))
        if begin < end
    ]


def _end_of(sample: Sample) -> list[int]:
    """Return a sample's last tokens, as many as the longest context has."""
    stop = sample.position + 1
    tokens = sample.tokens(max(stop - ORDERS[0], 0), stop)
    return [NO_TOKEN] * (ORDERS[0] - len(tokens)) + tokens
