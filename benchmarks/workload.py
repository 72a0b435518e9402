"""What do benchmarks train on? Nothing that has to be downloaded: a tokenizer of bytes, random models, random text."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>")


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per byte behind <pad>, <bos> and <eos>; ids beyond them decode to nothing."""
    tokens = [*SPECIAL_TOKENS, *sorted(ByteLevel.alphabet())]
    byte_level = Tokenizer(BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[]))
    byte_level.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    byte_level.decoder = ByteLevelDecoder()
    pad, bos, eos = SPECIAL_TOKENS
    return PreTrainedTokenizerFast(
        tokenizer_object=byte_level, pad_token=pad, bos_token=bos, eos_token=eos, padding_side="left"
    )


def random_texts(count: int, *, length: int, seed: int) -> list[str]:
    """Return ``count`` strings of ``length`` lower-case letters."""
    letters = torch.randint(0, 26, (count, length), generator=torch.Generator().manual_seed(seed)).tolist()
    return ["".join(chr(ord("a") + letter) for letter in row) for row in letters]


def share_of_vowels(completions: Sequence[str], **_: object) -> list[float]:
    """Reward the share of vowels in a completion: a rule that a tiny policy climbs within a few steps."""
    return [sum(letter in "aeiou" for letter in text) / max(1, len(text)) for text in completions]
