"""Drafts by a model: another one with the same vocabulary, or the target's own first blocks.

Another model has a cache of its own, whose slots follow the target's; where that is paged, a part of every page. It is
filled when a draft is made: what the target took since the last draft is read in one forward, then every drafted token
costs one more.

The first blocks compute what the target computes there, from the same tokens by the same weights. So their keys and
values are in the target's cache: nothing is read twice, nothing is missed while drafting rests, and what is drafted is
written where the target will write when it verifies.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import accumulate

from torch import Tensor, nn

from lightning_realloc.errors import GenerationError
from lightning_realloc.generation.cache.kv_cache import KVCache, SlotCache
from lightning_realloc.generation.cache.paged_cache import PagedCache
from lightning_realloc.generation.core.model_config import text_config_of, vocabulary_of
from lightning_realloc.generation.core.sample import Sample
from lightning_realloc.generation.forward.attention import check_supported, slot_attention
from lightning_realloc.generation.forward.cuda_graphs import StepGraphs
from lightning_realloc.generation.forward.packed_rows import DecodeRow, PrefillChunk
from lightning_realloc.generation.forward.runner import ModelRunner
from lightning_realloc.generation.speculative.draft_distillation import Distillation
from lightning_realloc.generation.speculative.drafting import Chance, Drafter, Exchange
from lightning_realloc.generation.speculative.verify import Draft, Verification
from lightning_realloc.runtime.model.structure import find_blocks

_SHORT = 16
"""Tokens of a sample that are read as a row rather than as a prompt."""
_MOST_READ = 8192
"""Tokens of prompts that are read in one forward: what a draft model missed while it rested may be much."""


class _DrawingDrafter(Drafter, ABC):
    """Draws drafts from the logits of a causal language model, with the noise that the target will draw with."""

    anticipates = False
    costs_a_forward = True

    _cache: KVCache
    _graphs: StepGraphs | None = None

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def begin(self, samples: Sequence[Sample], verification: Verification, num_slots: int) -> None:
        self._verification = verification
        longest = max((len(sample.prompt) + sample.max_new_tokens for sample in samples), default=1)
        check_supported(self.model, max_length=longest)
        self._context = getattr(text_config_of(self.model), "max_position_embeddings", longest)
        graphs = self._graphs if self.cuda_graphs else None
        self._runner = ModelRunner(self.model, self._cache, num_slots=num_slots, longest=longest, graphs=graphs)

    def propose(
        self, running: Sequence[Sample], limits: Sequence[int], chance: Chance, least_survivals: Sequence[float]
    ) -> list[Draft]:
        room = [min(limit, self._context - sample.position - 1) for limit, sample in zip(limits, running, strict=True)]
        drafts = [_Draft(limit, least) for limit, least in zip(room, least_survivals, strict=True)]
        if not any(draft.grows for draft in drafts):
            return [draft.made() for draft in drafts]
        begin = self.clock()
        logits = self._read_what_is_new(running)
        for offset in range(max(room)):
            drawn = self._verification.draw_drafts(logits, running, offset)
            for slot, draft in enumerate(drafts):
                if draft.grows:
                    kind = ("model", _eighths(drawn.confidences[slot]))
                    law = () if drawn.laws is None else (drawn.laws[slot],)
                    draft.add(drawn.tokens[slot], kind, chance(kind), law)
            if not offset:
                self.first_s = self.clock() - begin
            if not any(draft.grows for draft in drafts):
                break
            logits = self._read_drafted(running, drafts)
        return [draft.made() for draft in drafts]

    @abstractmethod
    def _read_what_is_new(self, running: Sequence[Sample]) -> Tensor:
        """Return the logits (B, V) behind each sample's last token."""

    def _read_drafted(self, running: Sequence[Sample], drafts: Sequence[_Draft]) -> Tensor:
        """Return the logits (B, V) behind each draft's newest token; a draft that is done reads it once more."""
        rows = []
        for sample, draft in zip(running, drafts, strict=True):
            newest = draft.tokens[-1] if draft.tokens else sample.last_token
            rows.append(self._row((newest,), sample.position + len(draft.tokens)))
        return self._runner.forward([], rows)

    def _row(self, tokens: Sequence[int], position: int) -> DecodeRow:
        """Return a row to read; of a sample beyond the drafter's context one that is read for nothing."""
        return DecodeRow(tokens, position) if position < self._context else DecodeRow(tokens[-1:], self._context - 1)


class BlocksDrafter(_DrawingDrafter):
    """Drafts by the first blocks of the target, on the target's own keys and values.

    Source of the idea: self-speculative decoding with a shared cache, LayerSkip (arXiv:2404.16710).
    """

    reads_target_cache = True

    def __init__(self, target: nn.Module, count: int) -> None:
        """Draft by the first ``count`` blocks of ``target``, through its last norm and head.

        Raises:
            GenerationError: where the model has no more blocks than that.
        """
        super().__init__(first_blocks(target, count))

    def share_cache(self, cache: KVCache) -> None:
        self._cache = cache
        if self._graphs is None and isinstance(cache, SlotCache):
            self._graphs = StepGraphs(self.model, cache)

    def _read_what_is_new(self, running: Sequence[Sample]) -> Tensor:
        return self._runner.forward([], [DecodeRow((sample.last_token,), sample.position) for sample in running])


class ModelDrafter(_DrawingDrafter):
    """Drafts by another causal language model, which keeps keys and values of its own."""

    def __init__(self, model: nn.Module, target: nn.Module, *, distillation: Distillation | None = None) -> None:
        """Draft for ``target`` with ``model``, which learns from every generation by ``distillation``.

        Raises:
            GenerationError: where their vocabularies differ, or the engine cannot run the drafter.
        """
        try:
            check_supported(model, max_length=1)
        except GenerationError as error:
            raise GenerationError(
                f"{type(model).__name__} cannot be the draft model, since the native engine cannot run it; use another "
                f"one, or draft by 'history' or 'ngram'"
            ) from error
        ours, theirs = (vocabulary_of(of) for of in (model, target))
        if ours != theirs:
            raise GenerationError(
                f"the draft model has a vocabulary of {ours} tokens and the target one of {theirs}; drafts are token "
                f"ids, so give a draft model of the target's own tokenizer, or draft by 'history' or 'ngram'"
            )
        super().__init__(model)
        self._cache = cache = SlotCache()
        self._graphs = StepGraphs(model, cache)
        self._distillation = distillation
        self._finished: list[Exchange] = []
        self._session = ExitStack()
        self._filled: list[int] = []
        """Positions of each slot whose keys and values are those of its sample."""
        self._ahead: list[list[int]] = []
        """Drafted tokens of each slot that were read behind them."""

    def share_cache(self, cache: KVCache) -> None:
        if isinstance(cache, PagedCache):
            self._cache, self._graphs = cache.for_drafts(), None
            with slot_attention(self.model):
                ModelRunner(self.model, self._cache, num_slots=1, longest=1).forward([], [])

    def begin(self, samples: Sequence[Sample], verification: Verification, num_slots: int) -> None:
        super().begin(samples, verification, num_slots)
        self._filled = [0] * num_slots
        self._ahead = [[] for _ in range(num_slots)]
        self._session.enter_context(slot_attention(self.model))

    def admitted(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._filled[slot] = 0
            self._ahead[slot] = []

    def copied(self, source: int, targets: Sequence[int], length: int) -> None:
        known = min(length, self._filled[source])
        self._cache.copy(source, targets, known)
        for target in targets:
            self._filled[target] = known
            self._ahead[target] = []

    def kept(self, slot: int, length: int) -> None:
        self._filled[slot] = min(length, self._filled[slot])
        self._ahead[slot] = []

    def swapped(self, first: int, second: int) -> None:
        self._cache.swap(first, second, max(self._filled[slot] + len(self._ahead[slot]) for slot in (first, second)))
        filled, ahead = self._filled, self._ahead
        filled[first], filled[second] = filled[second], filled[first]
        ahead[first], ahead[second] = ahead[second], ahead[first]

    def num_unread(self, running: Sequence[Sample]) -> int:
        filled = self._filled
        return sum(sample.position - filled[slot] for slot, sample in enumerate(running) if self._reaches(sample))

    def propose(
        self, running: Sequence[Sample], limits: Sequence[int], chance: Chance, least_survivals: Sequence[float]
    ) -> list[Draft]:
        for slot, sample in enumerate(running):
            self._keep_what_stood(slot, sample)
        return super().propose(running, limits, chance, least_survivals)

    def finished(self, sample: Sample) -> None:
        if self._distillation is not None:
            self._finished.append((tuple(sample.prompt), tuple(sample.token_ids)))

    def end(self, *, has_failed: bool = False) -> None:
        self._session.close()
        self._cache.release()
        finished, self._finished = self._finished, []
        if self._distillation is not None and not has_failed:
            self._distillation.learn(finished)

    def _reaches(self, sample: Sample) -> bool:
        """Whether the drafter's context holds what the sample has so far; behind it nothing is drafted any more."""
        return sample.position < self._context

    def _keep_what_stood(self, slot: int, sample: Sample) -> None:
        """Count drafted tokens that the target took, too, as filled: their keys and values are there."""
        filled = self._filled[slot]
        for token in self._ahead[slot]:
            if filled > sample.position or sample.token_at(filled) != token:
                break
            filled += 1
        self._filled[slot] = min(filled, sample.position)  # the last token is read again, for its logits
        self._ahead[slot] = []

    def _read_what_is_new(self, running: Sequence[Sample]) -> Tensor:
        prompts: dict[tuple[int, ...], list[int]] = {}
        prefills, rows = [], []
        for slot, sample in enumerate(running):
            begin = self._filled[slot]
            if not self._reaches(sample):
                rows.append(self._row((sample.last_token,), sample.position))
                continue
            if sample.position - begin > _SHORT:
                unread = tuple(sample.tokens(begin, sample.position))
                if begin:
                    prefills.append(PrefillChunk(unread, (slot,), begin))
                else:
                    prompts.setdefault(unread, []).append(slot)
                begin = sample.position
            rows.append(DecodeRow(sample.tokens(begin, sample.position + 1), begin))
            self._filled[slot] = sample.position + 1
        prefills += [PrefillChunk(tokens, tuple(slots)) for tokens, slots in prompts.items()]
        *earlier, last = _in_pieces(prefills)
        for piece in earlier:
            self._runner.forward(piece, [])
        logits = self._runner.forward(last, rows)
        return logits[[end - 1 for end in accumulate(len(row.tokens) for row in rows)]]

    def _read_drafted(self, running: Sequence[Sample], drafts: Sequence[_Draft]) -> Tensor:
        self._ahead[: len(drafts)] = [list(draft.tokens) for draft in drafts]
        return super()._read_drafted(running, drafts)


def _in_pieces(prefills: Sequence[PrefillChunk]) -> list[list[PrefillChunk]]:
    """Return what is to be read, one piece at least, each of a bounded number of tokens."""
    pieces: list[list[PrefillChunk]] = [[]]
    room = _MOST_READ
    for prefill in prefills:
        begin = 0
        while begin < len(prefill.tokens):
            if not room:
                pieces.append([])
                room = _MOST_READ
            tokens = prefill.tokens[begin : begin + room]
            pieces[-1].append(PrefillChunk(tokens, prefill.slots, prefill.begin + begin))
            begin += len(tokens)
            room -= len(tokens)
    return pieces


class _Draft:
    """One sample's draft while it grows."""

    def __init__(self, limit: int, least_survival: float) -> None:
        self.tokens: list[int] = []
        self._kinds: list[object] = []
        self._laws: list[Tensor] = []
        self._limit = limit
        self._least_survival = least_survival
        self._survival = 1.0

    @property
    def grows(self) -> bool:
        return len(self.tokens) < self._limit and self._survival >= self._least_survival

    def add(self, token: int, kind: object, chance: float, law: Sequence[Tensor]) -> None:
        self.tokens.append(token)
        self._kinds.append(kind)
        self._laws.extend(law)
        self._survival *= chance

    def made(self) -> Draft:
        return Draft(self.tokens, self._kinds, self._laws)


def _eighths(confidence: float) -> int:
    """Return a probability in eighths; 0 where a draft model that diverged says none."""
    return 0 if math.isnan(confidence) else int(8 * confidence)


def first_blocks(model: nn.Module, count: int) -> nn.Module:
    """Return a model of the first blocks of ``model``, its embedding, last norm and head: no weight of its own.

    Raises:
        GenerationError: where the model has no more blocks than that.
    """
    names = [name for name, _ in find_blocks(model)]
    path, _, _ = names[0].rpartition(".") if names else ("", "", "")
    blocks = model.get_submodule(path) if path else None
    if len(names) < 2:
        raise GenerationError(
            f"drafter='blocks' needs a model of two blocks at least to draft by the first of them, and "
            f"{type(model).__name__} has {len(names)}; draft by 'history', 'ngram' or a draft model"
        )
    if not isinstance(blocks, nn.ModuleList) or not 1 <= count < len(blocks):
        raise GenerationError(
            f"draft_blocks={count} must lie between 1 and {len(names) - 1}, below the number of blocks of "
            f"{type(model).__name__}, {len(names)}"
        )
    shortened: nn.Module = blocks[:count]
    for name in reversed(path.split(".")):
        path = path.rpartition(".")[0]
        shortened = _with_child(model.get_submodule(path) if path else model, name, shortened)
    return shortened


def _with_child(module: nn.Module, name: str, child: nn.Module) -> nn.Module:
    """Return a shallow copy of ``module`` with another child under ``name``."""
    copied = copy.copy(module)
    copied._modules = dict(module._modules)
    copied._modules[name] = child
    return copied
