"""Models that cannot do what a role asks of them are refused before a step."""

from __future__ import annotations

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_realloc.algorithms.base.role import Role
from lightning_realloc.errors import ConfigError
from lightning_realloc.runtime.model.batching_limits import attends_to_later_tokens
from tests.models import EXPERT_FAMILIES, FAMILIES, SCORING_FAMILIES, SIZES, tiny_model


def test_an_encoder_is_no_language_model_unless_it_is_a_decoder() -> None:
    config = AutoConfig.for_model("bert", **SIZES)
    for source in (config, AutoModelForCausalLM.from_config(config)):
        with pytest.raises(ConfigError, match="actor is a BertLMHeadModel whose tokens attend to later ones"):
            Role(name="actor", source=source, trained=True).build(seed=0)
    with pytest.raises(ConfigError, match="actor is a BertLMHeadModel whose tokens attend to later ones"):
        Role(name="actor", source=config, trained=True).describe()
    Role(name="reward", source=config, trained=True, task="sequence_classification").build(seed=0)
    Role(name="actor", source=AutoConfig.for_model("bert", **SIZES, is_decoder=True), trained=True).build(seed=0)


def test_a_configuration_that_no_model_can_be_made_from_is_named() -> None:
    config = AutoConfig.for_model("llama", **{**SIZES, "pad_token_id": 500})
    with pytest.raises(ConfigError, match=r"critic: transformers makes no model of the family 'llama' .*Padding_idx"):
        Role(name="critic", source=config, trained=True, task="token_classification").describe()


@pytest.mark.parametrize("family", [*FAMILIES, *EXPERT_FAMILIES, *SCORING_FAMILIES])
def test_decoders_are_no_encoders(family: str) -> None:
    assert not attends_to_later_tokens(tiny_model(family))


def test_a_decoder_that_may_read_an_encoder_is_none() -> None:
    sizes = {"vocab_size": 128, "d_model": 64, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 64}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("bart", **sizes, is_encoder_decoder=False))
    assert not attends_to_later_tokens(model)
