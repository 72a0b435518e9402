"""Tiny Hugging Face models for the tests: every supported family, a few ten thousand weights each.

Four query heads, two key-value heads where the family has them, two blocks. Weights depend only on the seed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from lightning_realloc.runtime.model.structure import copy_model

SIZES: Mapping[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_WITHOUT_GROUPS = {name: size for name, size in SIZES.items() if name != "num_key_value_heads"}
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "llama": SIZES,
    "qwen2": {**SIZES, "tie_word_embeddings": True},
    "qwen3": {**SIZES, "head_dim": 16, "tie_word_embeddings": False},
    "mistral": {**SIZES, "sliding_window": None},
    "gemma": {**SIZES, "head_dim": 16, "tie_word_embeddings": True},
    "phi3": SIZES,
    "gpt_neox": _WITHOUT_GROUPS,
    "gpt2": {
        "vocab_size": 128,
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 128,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        # gpt2 and opt use dropout by default, which makes exact comparisons impossible.
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    },
    "opt": {
        **{name: size for name, size in _WITHOUT_GROUPS.items() if name != "intermediate_size"},
        "ffn_dim": 128,
        "word_embed_proj_dim": 64,
        "dropout": 0.0,
        "layerdrop": 0.0,
    },
}
_LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}  # fmt: skip
EXPERT_FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "mixtral": {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {**SIZES, "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
}
"""Mixtures of experts."""
FURTHER_EXPERT_FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "olmoe": {**SIZES, "num_experts": 4, "num_experts_per_tok": 2},
    "glm4_moe": {
        **SIZES, "head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
        "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
    },
    "deepseek_v3": {
        **SIZES, **_LATENT, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
        "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1,
    },
}  # fmt: skip
"""Further mixtures of experts: with norms over all heads, and with shared experts and a first dense block."""
LATENT_FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "deepseek_v2": {
        **SIZES, **_LATENT, "q_lora_rank": None, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 48, "first_k_dense_replace": 1,
    },
    "minicpm3": {**SIZES, **_LATENT, "qk_rope_head_dim": 16, "dim_model_base": None},
}  # fmt: skip
"""Families with latent attention next to deepseek_v3: another mixture of experts, and a dense one."""
SCORING_FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "gemma2": {**SIZES, "head_dim": 16, "sliding_window": 6, "attn_logit_softcapping": 0.5},
    "gpt_oss": {**SIZES, "head_dim": 16, "sliding_window": 6, "num_local_experts": 4, "num_experts_per_tok": 2},
    "granite_swa": {**SIZES, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
}
"""Families with soft caps (gemma2) or attention sinks."""
UNEVEN_HEADS: Mapping[str, Mapping[str, Any]] = {
    f"{query}/{key_value}": {
        "num_attention_heads": query, "num_key_value_heads": key_value, "head_dim": 8, "hidden_size": 8 * query,
        "vocab_size": 131, "intermediate_size": 90,
    }
    for query, key_value in ((9, 3), (14, 2), (6, 2), (5, 5))
}  # fmt: skip
"""Sizes with these query and key-value heads, which most tensor-parallel degrees do not divide, as no other size."""
TENSOR_PARALLEL_FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma", "phi3", "gpt_neox")
"""Families whose transformers class has a ``tp_plan``."""
PLACEHOLDER = 99
"""Token whose embedding `LlamaWithFeatures` replaces."""
TIED_FAMILIES = ("qwen2", "gemma", "gpt2", "opt")


_built: OrderedDict[str, PreTrainedModel] = OrderedDict()
"""Models of late, by their settings: a copy takes a fifth of the time."""
_MAX_BUILT = 16


def tiny_model(family: str, *, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """Return the family's causal language model: fp32, eval mode, eager attention; ``overrides`` go to its config."""
    settings = {
        "attn_implementation": "eager",
        **{**FAMILIES, **EXPERT_FAMILIES, **FURTHER_EXPERT_FAMILIES, **LATENT_FAMILIES, **SCORING_FAMILIES}[family],
        **overrides,
    }
    key = repr((family, seed, torch.get_default_dtype(), sorted(settings.items())))
    _built[key] = _built.pop(key, None) or _build(family, seed, settings)
    if len(_built) > _MAX_BUILT:
        _built.popitem(last=False)
    return copy_model(_built[key])  # type: ignore[return-value, unused-ignore]


def _build(family: str, seed: int, settings: Mapping[str, Any]) -> PreTrainedModel:
    config = AutoConfig.for_model(family, **settings)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    # Fresh norms and biases are ones and zeros: a permuted or missing shard of them would go unnoticed.
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def tiny_scorer(family: str, *, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """Build the family's sequence classifier of one label, with weights that score sequences clearly differently."""
    settings = {"attn_implementation": "eager", **FAMILIES[family], "num_labels": 1, **overrides}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = AutoConfig.for_model(family, **settings)
        model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        model.score.weight.mul_(20.0)
    return model.eval()


class LlamaWithFeatures(LlamaForCausalLM):
    """Llama that reads ``features`` (rows, 64) in place of the embeddings of `PLACEHOLDER` tokens, as models with
    images read pictures. The numbers of both must be equal."""

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor,
        *,
        features: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        **others: Any,
    ) -> Any:
        """Return what `LlamaForCausalLM` does."""
        if features is None:
            return super().forward(input_ids=input_ids, logits_to_keep=logits_to_keep, **others)
        places = input_ids == PLACEHOLDER
        assert int(places.sum()) == len(features), f"{int(places.sum())} placeholders for {len(features)} rows"
        embedded = self.model.embed_tokens(input_ids)
        embedded = embedded.masked_scatter(places[..., None], features.to(embedded.dtype))
        return super().forward(inputs_embeds=embedded, logits_to_keep=logits_to_keep, **others)


def model_with_features(*, seed: int = 0) -> LlamaWithFeatures:
    """Return a tiny `LlamaWithFeatures`, with weights that tell its features clearly apart."""
    llama = tiny_model("llama", seed=seed)
    model = LlamaWithFeatures(llama.config)
    model.load_state_dict(llama.state_dict())
    return model.eval()


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per byte after <pad>, <bos> and <eos>: 259 tokens."""
    special = ["<pad>", "<bos>", "<eos>"]
    tokens = [*special, *sorted(ByteLevel.alphabet())]
    byte_level = Tokenizer(BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[]))
    byte_level.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    byte_level.decoder = ByteLevelDecoder()
    pad, bos, eos = special
    return PreTrainedTokenizerFast(
        tokenizer_object=byte_level, pad_token=pad, bos_token=bos, eos_token=eos, padding_side="left"
    )
