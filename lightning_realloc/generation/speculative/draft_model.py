"""Drafts by a model: another one with the same vocabulary, or the target's own first blocks.

A draft model has a cache of its own, whose slots follow the target's. In a paged cache it uses a part of each page.
The first drafted token costs one forward over the tokens that the target emitted since the last draft. Each further
drafted token costs one more.

First blocks compute the same keys and values as the target, and read the target's cache. So they read no token twice
and miss none, and verification overwrites the keys and values of drafted tokens.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_realloc.errors import GenerationError
from lightning_realloc.generation.cache.kv_cache import KVCache, SlotCache
from lightning_realloc.generation.cache.paged_cache import DraftCache, PagedCache
from lightning_realloc.generation.core.model_config import check_supported, text_config_of, vocabulary_of
from lightning_realloc.generation.core.sample import Sample
from lightning_realloc.generation.core.step import NO_DRAFT, DecodeRow, Draft, PrefillChunk
from lightning_realloc.generation.forward.attention import slot_attention
from lightning_realloc.generation.forward.cuda_graphs import StepGraphs
from lightning_realloc.generation.forward.runner import ModelRunner
from lightning_realloc.generation.speculative.draft_distillation import Distillation, Example
from lightning_realloc.generation.speculative.drafter import Drafter
from lightning_realloc.generation.speculative.verify import Verification
from lightning_realloc.remote_path import expand_home, require_files
from lightning_realloc.runtime.model.hub_kernels import refuse_kernels
from lightning_realloc.runtime.model.structure import find_blocks

_SHORT = 16
"""Most unread tokens of a sample that are read as a row; more are read as a prompt, which takes longer."""
_MOST_READ = 8192
"""Most tokens of prompts in one forward. Larger: fewer forwards after a rest, and more memory."""


class _DrawingDrafter(Drafter, ABC):
    """Draws drafts from the logits of a causal language model, with the random numbers that the target draws with."""

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

    def propose(self, running: Sequence[Sample], limits: Sequence[int]) -> list[Draft]:
        room = [min(limit, self._context - sample.position - 1) for limit, sample in zip(limits, running, strict=True)]
        drafts: list[list[int]] = [[] for _ in room]
        laws: list[list[Tensor]] = [[] for _ in room]
        if max(room) <= 0:
            return [NO_DRAFT] * len(room)
        logits = self._read_new_tokens(running)
        for offset in range(max(room)):
            if offset:
                logits = self._read_drafted(running, drafts)
            tokens, drawn_from = self._verification.draw_drafts(logits, running, offset)
            for slot, draft in enumerate(drafts):
                if offset < room[slot]:
                    draft.append(tokens[slot])
                    if drawn_from is not None:
                        laws[slot].append(drawn_from[slot])
        return [Draft(draft, laws=own) for draft, own in zip(drafts, laws, strict=True)]

    @abstractmethod
    def _read_new_tokens(self, running: Sequence[Sample]) -> Tensor:
        """Return the logits (B, V) after each sample's last token."""

    def _read_drafted(self, running: Sequence[Sample], drafts: Sequence[Sequence[int]]) -> Tensor:
        """Return the logits (B, V) after each draft's last token. A draft at its limit reads that token again."""
        rows = []
        for sample, draft in zip(running, drafts, strict=True):
            newest = draft[-1] if draft else sample.last_token
            rows.append(self._row((newest,), sample.position + len(draft)))
        return self._runner.forward([], rows)

    def _row(self, tokens: Sequence[int], position: int) -> DecodeRow:
        """Return a row to read. A sample beyond the drafter's context reads one whose logits are not used."""
        return DecodeRow(tokens, position) if position < self._context else DecodeRow(tokens[-1:], self._context - 1)


class BlocksDrafter(_DrawingDrafter):
    """Drafts by the target's first blocks, which use its keys and values.

    Source of the idea: self-speculative decoding with a shared cache, LayerSkip (arXiv:2404.16710).
    """

    reads_target_cache = True

    def __init__(self, target: nn.Module, count: int) -> None:
        """Draft by the first ``count`` blocks of ``target``, through its last norm and head.

        Raises:
            GenerationError: where the model has no more blocks than ``count``.
        """
        super().__init__(first_blocks(target, count))

    def share_cache(self, cache: KVCache) -> None:
        self._cache = cache
        if self._graphs is None and isinstance(cache, SlotCache):
            self._graphs = StepGraphs(self.model, cache)

    def _read_new_tokens(self, running: Sequence[Sample]) -> Tensor:
        return self._runner.forward([], [DecodeRow((sample.last_token,), sample.position) for sample in running])


class ModelDrafter(_DrawingDrafter):
    """Drafts by another causal language model, with keys and values of its own."""

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
        self._learns = distillation is not None
        self._finished: list[Example] = []
        """Responses to learn from, shared with the drafters of `for_other_samples`."""
        self._session = ExitStack()
        self._filled: list[int] = []
        """Slot -> number of positions whose keys and values belong to its sample."""
        self._ahead: list[list[int]] = []
        """Slot -> drafted tokens that were read after the filled positions."""

    def for_other_samples(self) -> ModelDrafter:
        other = ModelDrafter(self.model, self.model)
        # This drafter learns from all responses, when it ends: until then the model attends through slots.
        other._finished, other._learns = self._finished, self._learns
        other.cuda_graphs = self.cuda_graphs
        return other

    def share_cache(self, cache: KVCache) -> None:
        if isinstance(cache, PagedCache):
            self._cache, self._graphs = DraftCache(cache), None
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

    def propose(self, running: Sequence[Sample], limits: Sequence[int]) -> list[Draft]:
        for slot, sample in enumerate(running):
            self._keep_accepted(slot, sample)
        return super().propose(running, limits)

    def finished(self, sample: Sample) -> None:
        if self._learns:
            self._finished.append((sample.prompt, tuple(sample.token_ids)))

    def end(self, *, has_failed: bool = False) -> None:
        self._session.close()
        self._cache.release()
        if self._distillation is not None:
            finished = list(self._finished)
            self._finished.clear()
            if not has_failed:
                self._distillation.learn(finished)

    def _reaches(self, sample: Sample) -> bool:
        """Return whether the sample fits in the drafter's context; beyond it nothing is drafted."""
        return sample.position < self._context

    def _keep_accepted(self, slot: int, sample: Sample) -> None:
        """Count accepted tokens as filled, since their keys and values are in the cache."""
        filled = self._filled[slot]
        for token in self._ahead[slot]:
            if filled > sample.position or sample.token_at(filled) != token:
                break
            filled += 1
        self._filled[slot] = min(filled, sample.position)  # the last token is read again, for its logits
        self._ahead[slot] = []

    def _read_new_tokens(self, running: Sequence[Sample]) -> Tensor:
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

    def _read_drafted(self, running: Sequence[Sample], drafts: Sequence[Sequence[int]]) -> Tensor:
        self._ahead[: len(drafts)] = [list(draft) for draft in drafts]
        return super()._read_drafted(running, drafts)


def _in_pieces(prefills: Sequence[PrefillChunk]) -> list[list[PrefillChunk]]:
    """Split prefills into pieces of at most `_MOST_READ` tokens, at least one piece."""
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


def first_blocks(model: nn.Module, count: int) -> nn.Module:
    """Return a model of the embedding, first blocks, last norm and head of ``model``, which shares its weights.

    Raises:
        GenerationError: where the model has no more blocks than ``count``.
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


def describe_draft_model(source: str | Path | nn.Module) -> nn.Module:
    """Return a draft model on the meta device, from its configuration alone; a loaded model is returned as it is.

    Raises:
        GenerationError: for a configuration that cannot be read.
    """
    if isinstance(source, nn.Module):
        return source
    with _loading(source) as name:
        config = AutoConfig.from_pretrained(name)
        refuse_kernels(config, name)
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(config)
    return model


def load_draft_model(source: str | Path) -> nn.Module:
    """Return the draft model with this name or in this folder.

    Raises:
        GenerationError: for a model that cannot be loaded.
    """
    with _loading(source) as name:
        refuse_kernels(AutoConfig.from_pretrained(name), name)
        model: nn.Module = AutoModelForCausalLM.from_pretrained(name)
    return model


@contextmanager
def _loading(source: str | Path) -> Iterator[str]:
    """Yield a name or folder for Transformers, which would look for a missing folder on the hub; word its errors."""
    name = str(expand_home(source))
    try:
        require_files(expand_home(source), "config.json")
        yield name
    except Exception as error:  # damaged files raise errors of any class
        raise GenerationError(
            f"draft_model={name!r} could not be loaded ({type(error).__name__}: {error}); give a Hugging Face name, a "
            f"folder with config.json and weights, or the model itself"
        ) from error
