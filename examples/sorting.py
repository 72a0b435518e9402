"""The task of the examples: write the letters of a word in alphabetical order.

A model of a hundred thousand weights can learn it, and every answer can be checked. There are far more words than the
model sees, so it cannot know the held-out ones by heart.
"""

from __future__ import annotations

import json
import random
import string
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import LlamaConfig, PreTrainedTokenizerFast

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>")
WORD_LENGTHS = (4, 5, 6)

Row = dict[str, str]
"""One line of a JSONL file."""


def random_words(count: int, rng: random.Random) -> list[str]:
    """Return ``count`` different words of letters that do not repeat."""
    words: dict[str, None] = {}
    while len(words) < count:
        words["".join(rng.sample(string.ascii_lowercase, rng.choice(WORD_LENGTHS)))] = None
    return list(words)


def problem(word: str) -> Row:
    """Return a prompt with the answer to check completions against."""
    return {"prompt": f"sort {word}: ", "answer": "".join(sorted(word))}


def demonstration(word: str, *, right: bool) -> Row:
    """Return a prompt with a completion to imitate: the letters from a to z, or from z to a."""
    return {"prompt": f"sort {word}: ", "completion": "".join(sorted(word, reverse=not right))}


def write_jsonl(path: Path, rows: Iterable[Row]) -> None:
    """Write one JSON object per line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def read_jsonl(path: Path) -> list[Row]:
    """Return the rows of a file of :func:`write_jsonl`."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per byte, after <pad>, <bos> and <eos>: 259 in all."""
    tokens = [*SPECIAL_TOKENS, *sorted(ByteLevel.alphabet())]
    bytewise = Tokenizer(BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[]))
    bytewise.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    bytewise.decoder = ByteLevelDecoder()
    pad, bos, eos = SPECIAL_TOKENS
    return PreTrainedTokenizerFast(tokenizer_object=bytewise, pad_token=pad, bos_token=bos, eos_token=eos)


def tiny_llama(**overrides: Any) -> LlamaConfig:
    """Return the configuration of a Llama with about 107,000 weights."""
    sizes: dict[str, Any] = {
        "vocab_size": 260,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        # The usual 0.02 suits wider models; with it this one learns several times more slowly.
        "initializer_range": 0.1,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return LlamaConfig(**sizes | overrides)
