"""Compare vocabularies: of two models that read the same token ids, and of a model and its input."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from lightning_realloc.algorithms.base.role import Role
from lightning_realloc.batch.packing import PackedBatch, pack
from lightning_realloc.batch.samples import Ragged, Samples
from lightning_realloc.data.chat import (
    answer_message,
    as_message,
    conversation_text,
    is_conversation,
    partial_answer,
    template_input,
    token_ids,
)
from lightning_realloc.data.tokenizers import load_tokenizer
from lightning_realloc.errors import ConfigError, DataError
from lightning_realloc.generation.core.model_config import check_vocabulary

PROBE = "The 3 quick brown foxes\n\tjumped; 12345 + 0.5 != naïve café — 你好, мир! <|im_end|> </s>"
"""Text that reveals different merges of equal vocabularies: it has characters of many kinds."""
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


def require_same_vocabulary(
    role: Role, actor: Role, tokenizer: PreTrainedTokenizerBase | None, *, way_out: str
) -> None:
    """Raise ConfigError if a role reads other text from the actor's tokens than the actor wrote.

    The tokenizer of the role, if it has one, must equal the actor's ``tokenizer``. If one of them has none, their
    embeddings must have equal length. Otherwise the role's must only be long enough, since models of a family are
    padded differently.

    Raises:
        ConfigError: with the difference and ``way_out``.
    """
    own = own_tokenizer(role)
    ours, theirs = _vocabulary_size(actor), _vocabulary_size(role)
    if tokenizer is not None and own is not None:
        difference = _difference(tokenizer, own)
        if difference is not None:
            raise ConfigError(f"{role.name} has another tokenizer than the actor: {difference}; {way_out}")
        fits = ours is None or theirs is None or theirs >= min(ours, len(tokenizer))
    else:
        fits = ours is None or theirs is None or theirs == ours
    if not fits:
        raise ConfigError(
            f"{role.name} has another vocabulary than the actor: {theirs} tokens, the actor has {ours}; {way_out}"
        )


def check_token_ids(samples: Samples, models: Mapping[str, nn.Module]) -> None:
    """Check that every model, by role, has an embedding for all token ids.

    Raises:
        DataError: for the first sample with another id.
    """
    sizes = {role: size for role, model in models.items() if (size := _size_of(getattr(model, "config", None)))}
    if not sizes:
        return
    role, size = min(sizes.items(), key=lambda item: item[1])
    for part in ("prompt", "response"):
        ids = samples.ragged(f"{part}_ids") if f"{part}_ids" in samples else None
        if ids is None or not ids.num_tokens or 0 <= int(ids.values.min()) <= int(ids.values.max()) < size:
            continue
        for sample, tokens in zip(samples.ids.tolist(), ids.to_lists(), strict=True):
            if tokens:
                check_vocabulary(f"the {part} of sample {sample}", tokens, size, model=role, error=DataError)


def own_tokenizer(role: Role) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer next to a role's weights; None if there is none."""
    if not isinstance(role.source, str | Path):
        return None
    folder = Path(role.source)
    if folder.is_dir():
        return load_tokenizer(folder) if any((folder / name).is_file() for name in _TOKENIZER_FILES) else None
    try:
        return load_tokenizer(role.source)
    except ConfigError:  # a repository with weights alone
        return None


def required_tokenizer(role: Role) -> PreTrainedTokenizerBase:
    """Return the tokenizer next to a role's weights; ConfigError if there is none."""
    tokenizer = own_tokenizer(role)
    if tokenizer is None:
        raise ConfigError(
            f"{role.name}_tokenizer='retokenize' needs the tokenizer of {role.name}, and none lies beside its weights; "
            f"give {role.name}_tokenizer= that tokenizer itself"
        )
    return tokenizer


def retokenized(
    batch: PackedBatch,
    tokenizer: PreTrainedTokenizerBase,
    other: PreTrainedTokenizerBase,
    *,
    makes_messages: bool = False,
) -> PackedBatch:
    """Encode the same texts, prompt and response together, with ``other`` and its special tokens.

    Prompts that are messages are rendered by the chat template of ``other``, if it has one, with the response as the
    assistant's message. Special tokens of ``tokenizer`` are removed from the texts, because another model does not know
    them.

    Args:
        makes_messages: Whether prompts that are text were given to the model as a user message.
    """
    if batch.extras:
        raise ConfigError(
            "a model with another tokenizer than the actor's judges texts alone, and these prompts show images; give "
            "one with the actor's tokenizer, or judge by a reward function, which gets the images"
        )
    prompts = batch.data.get("prompt", (None,) * len(batch))
    encoded: list[list[int]] = []
    for row, (prompt, ids) in enumerate(zip(prompts, _sequences(batch), strict=True)):
        messages = as_message(prompt, makes_messages)
        if other.chat_template is None or not is_conversation(messages):
            encoded.append(list(other(str(tokenizer.decode(ids, skip_special_tokens=True)))["input_ids"]))
            continue
        response = ids[len(ids) - batch.response_lengths[row] :]
        answer = answer_message(messages, str(tokenizer.decode(response, skip_special_tokens=True)))
        asked = messages if partial_answer(messages) is None else messages[:-1]
        values, place = {name: column[row] for name, column in batch.data.items()}, f"sample {int(batch.ids[row])}"
        text = conversation_text(
            other, [*asked, answer], place, add_generation_prompt=False, template=template_input(values, place, {})
        )
        encoded += token_ids(other, [text])
    empty = Ragged(torch.empty(0, dtype=torch.int64), torch.zeros(len(batch), dtype=torch.int64))
    columns = {"prompt_ids": Ragged.from_list(encoded), "response_ids": empty}
    return pack(Samples(batch.ids, columns)).to(batch.input_ids.device)


def _sequences(batch: PackedBatch) -> list[list[int]]:
    """Return the token ids of every sequence of a pack, each with its prompt."""
    full: list[list[int]] = []
    owner: list[int] = []
    parts = torch.split(batch.input_ids[0].cpu(), list(batch.lengths))
    for part, shared in zip(parts, batch.shared, strict=True):
        ids = [*owner[:shared], *part.tolist()]
        if not shared:
            owner = ids
        full.append(ids)
    return full


def _difference(ours: PreTrainedTokenizerBase, theirs: PreTrainedTokenizerBase) -> str | None:
    our_ids, their_ids = ours.get_vocab(), theirs.get_vocab()
    for token, index in sorted(our_ids.items(), key=lambda item: item[1]):  # the same difference on every rank
        if their_ids.get(token) != index:
            found = f"is {their_ids[token]}" if token in their_ids else "does not exist"
            return f"token {token!r} is {index} in the actor's vocabulary and {found} in its own"
    if len(their_ids) != len(our_ids):
        return f"its vocabulary has {len(their_ids)} tokens and the actor's {len(our_ids)}"
    if ours.encode(PROBE, add_special_tokens=False) != theirs.encode(PROBE, add_special_tokens=False):
        return f"both have {len(our_ids)} tokens, but cut the text {PROBE!r} differently"
    return None


def _vocabulary_size(role: Role) -> int | None:
    return _size_of(role.config())


def _size_of(config: object) -> int | None:
    size = getattr(config.get_text_config(), "vocab_size", None) if isinstance(config, PreTrainedConfig) else None
    return size if isinstance(size, int) else None
