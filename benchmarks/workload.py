"""Tokenizer, random models and random text for benchmarks, without downloads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PreTrainedModel, PreTrainedTokenizerFast

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>")
ADAM_EPS = 1e-4
"""Adam's eps. With the usual 1e-8, the last bit of a tiny gradient, which depends on the order of sums, becomes a whole
step."""


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per byte after <pad>, <bos> and <eos>; larger ids decode to nothing."""
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
    """Reward the share of vowels in a completion, which a tiny policy learns to raise within a few steps."""
    return [sum(letter in "aeiou" for letter in text) / max(1, len(text)) for text in completions]


def random_prompts(count: int, *, length: int, batch_size: int) -> Any:
    """Return a data module with ``count`` random texts of ``length`` letters as prompts."""
    from lightning_realloc import PromptDataModule

    rows = [{"prompt": text} for text in random_texts(count, length=length, seed=1)]
    return PromptDataModule(rows, batch_size=batch_size)


def llama_config(work: Any) -> LlamaConfig:
    """Return a Llama with tied embeddings and the sizes of a benchmark's ``Workload``."""
    return LlamaConfig(
        vocab_size=work.vocabulary, hidden_size=work.hidden_size, intermediate_size=work.intermediate_size,
        num_hidden_layers=work.num_layers, num_attention_heads=work.num_heads,
        num_key_value_heads=work.num_kv_heads, max_position_embeddings=512, tie_word_embeddings=True,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip


def random_model(
    architecture: str, *, hidden_size: int, num_layers: int, num_heads: int, seed: int
) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """Return a random fp32 model with untied embeddings over the tokens of `byte_tokenizer`, and the tokenizer."""
    tokenizer = byte_tokenizer()
    config = AutoConfig.for_model(
        architecture, vocab_size=len(tokenizer), hidden_size=hidden_size, intermediate_size=3 * hidden_size,
        num_hidden_layers=num_layers, num_attention_heads=num_heads, num_key_value_heads=max(1, num_heads // 2),
        max_position_embeddings=1024, pad_token_id=tokenizer.pad_token_id, bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32), tokenizer


def stable_adam(learning_rate: float) -> Callable[[Any], torch.optim.Optimizer]:
    """Return a factory of AdamW optimizers with `ADAM_EPS`, whose steps hardly depend on rounding."""
    return partial(torch.optim.AdamW, lr=learning_rate, eps=ADAM_EPS, weight_decay=0.0, fused=True)


def make_trainer(**options: Any) -> Any:
    """Return a Lightning ``Trainer`` on the CPU with all ranks, which logs, saves and prints nothing."""
    import lightning as L

    return L.Trainer(
        accelerator="cpu", devices=dist.get_world_size() if dist.is_initialized() else 1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, **options,
    )  # fmt: skip
