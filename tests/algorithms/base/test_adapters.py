"""A role's adapters: which weights are trained, how frozen roles merge them, and which settings are refused."""

from __future__ import annotations

import copy
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedConfig, PreTrainedModel

from lightning_realloc.algorithms.base.role import Role
from lightning_realloc.errors import ConfigError, LayoutError
from lightning_realloc.layout import Layout, ModelLayout
from lightning_realloc.runtime.model.adapter_layers import adapted_layers, adapters_disabled, adapters_merged
from lightning_realloc.runtime.parallel.model_spec import describe_model
from tests.models import byte_tokenizer, tiny_model, tiny_scorer
from tests.strategies import runs

TOKENS = torch.arange(3, 20)[None]
KINDS: dict[str, dict[str, Any]] = {"lora": {}, "rslora": {"use_rslora": True}, "dora": {"use_dora": True}}


def _lora(**options: Any) -> dict[str, Any]:
    return {"peft_type": "LORA", "r": 4, "target_modules": "all-linear", "init_lora_weights": False, **options}


def _actor(source: Any, peft: Any = None, **settings: Any) -> Role:
    return Role(**{"name": "actor", "source": source, "trained": True, "peft": peft, **settings})


@torch.no_grad()
def _logits(model: nn.Module) -> torch.Tensor:
    logits: torch.Tensor = model.eval()(input_ids=TOKENS).logits
    return logits


def _trained(model: nn.Module) -> nn.Module:
    """Perturb the adapters as training would; DoRA's magnitudes start at the norms of the base weights."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.mul_(1 + 0.1 * torch.randn(parameter.shape, generator=generator))
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_disabling_or_merging_adapters_for_a_while_restores_every_bit(kind: str) -> None:
    base = tiny_model("qwen3")
    model = _trained(_actor(base, _lora(**KINDS[kind])).build(seed=0))
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    apart = _logits(model)
    with adapters_disabled(model):
        assert torch.equal(_logits(model), _logits(base))
    with adapters_merged(model):
        merged = _logits(model)
    assert (apart - _logits(base)).abs().max() > 0.1
    torch.testing.assert_close(merged, apart, rtol=0, atol=1e-5)
    assert torch.equal(_logits(model), apart)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name])
        assert parameter.requires_grad == ("lora_" in name)


@pytest.mark.parametrize("kind", KINDS)
def test_kept_copies_of_merged_weights_are_filled_anew_where_they_are(kind: str) -> None:
    model = _trained(_actor(tiny_model("qwen3"), _lora(**KINDS[kind])).build(seed=0))
    addresses = []
    for _ in range(3):
        _trained(model)
        with adapters_merged(model):
            expected = _logits(model)
        with adapters_merged(model, keeps_copies=True):
            assert torch.equal(_logits(model), expected)
        for _ in range(2):
            with adapters_merged(model, keeps_copies=True):
                assert torch.equal(_logits(model), expected)
                addresses.append([weight.data_ptr() for weight in model.parameters()])
    if kind != "dora":  # which makes new tensors
        assert all(later == earlier for earlier, later in zip(addresses[::2], addresses[1::2], strict=True))


def test_a_wrapper_of_peft_computes_the_same() -> None:
    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], use_rslora=True, init_lora_weights=False)
    wrapped = get_peft_model(tiny_model("llama"), config)
    role = _actor(wrapped)
    model = role.build(seed=0)
    assert role.has_adapters and isinstance(model, PreTrainedModel)
    assert torch.equal(_logits(model), _logits(wrapped))
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert len(trained) == 8 and all("lora_" in name for name in trained)
    # A frozen role is a plain model into which the adapters are merged.
    frozen = _actor(wrapped, name="reference", trained=False).build(seed=0)
    assert not adapted_layers(frozen)
    torch.testing.assert_close(_logits(frozen), _logits(wrapped), rtol=0, atol=1e-5)
    critic = _actor(wrapped, name="critic", task="token_classification").build(seed=0)
    assert not adapted_layers(critic)


def test_a_critic_trains_adapters_and_its_head() -> None:
    role = _actor(tiny_model("qwen3"), _lora(), name="critic", task="token_classification")
    model = role.build(seed=0)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert {name for name in trained if "lora_" not in name} == {"score.weight", "score.bias"}
    assert any(name.endswith("down_proj.lora_A.default.weight") for name in trained)
    described = role.describe()
    assert describe_model(described) == describe_model(model)
    assert role.frozen_parameters(described) == {name for name, _ in model.named_parameters()} - trained


def test_parameters_that_a_given_module_froze_stay_frozen() -> None:
    partly = tiny_model("llama")
    partly.get_input_embeddings().requires_grad_(False)
    model = _actor(partly).build(seed=0)
    assert [name for name, p in model.named_parameters() if not p.requires_grad] == ["model.embed_tokens.weight"]
    assert _actor(partly).frozen_parameters(_actor(partly).describe()) == {"model.embed_tokens.weight"}
    wholly = tiny_model("llama").requires_grad_(False)
    assert all(parameter.requires_grad for parameter in _actor(wholly).build(seed=0).parameters())
    assert not _actor(wholly).frozen_parameters(_actor(wholly).describe())


def _save_adapters(folder: Path, model: PreTrainedModel, **options: Any) -> PeftModel:
    config = LoraConfig(**{"r": 4, "target_modules": ["q_proj"], "init_lora_weights": False, **options})
    adapted: PeftModel = get_peft_model(model, config)
    adapted.save_pretrained(folder)
    return adapted


def test_saved_adapters_are_trained_on_or_merged(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path / "base")
    saved = _save_adapters(tmp_path / "adapters", tiny_model("llama"))
    model = _actor(str(tmp_path / "base"), str(tmp_path / "adapters")).build(seed=3)
    torch.testing.assert_close(_logits(model), _logits(saved), rtol=0, atol=1e-5)  # another attention kernel
    scorer = tiny_scorer("llama")
    scored = _save_adapters(tmp_path / "judge", scorer, task_type="SEQ_CLS")
    # The base is a language model; the classification head comes with the adapters.
    judge = _actor(tmp_path / "base", tmp_path / "judge", name="reward", trained=False, task="sequence_classification")
    assert not adapted_layers(judge.build(seed=0))
    torch.testing.assert_close(judge.build(seed=0).score.weight, scored.score.modules_to_save.default.weight)


def test_adapters_that_were_loaded_frozen_are_trained_and_nothing_else(tmp_path: Path) -> None:
    folders = {name: str(tmp_path / name) for name in ("base", "adapters", "both")}
    tiny_model("llama").save_pretrained(folders["base"])
    _save_adapters(Path(folders["adapters"]), AutoModelForCausalLM.from_pretrained(folders["base"]))

    def load(**options: Any) -> PeftModel:
        base = AutoModelForCausalLM.from_pretrained(folders["base"])
        return PeftModel.from_pretrained(base, folders["adapters"], **options)

    added = AutoModelForCausalLM.from_pretrained(folders["base"])
    added.load_adapter(folders["adapters"])
    transformers_own = AutoModelForCausalLM.from_pretrained(folders["adapters"])
    for source in (load(), load(is_trainable=True), transformers_own, added):
        role = _actor(source)
        model, described = role.build(seed=0), role.describe()
        trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        assert len(trained) == 4 and all("lora_" in name for name in trained)
        assert role.frozen_parameters(described) == {name for name, _ in model.named_parameters()} - trained
    with pytest.raises(ConfigError, match="has adapters, and 21 other weights are to be trained, such as lm_head"):
        _actor(load().requires_grad_(True)).build(seed=0)
    with pytest.raises(ConfigError, match="adapters called sft, and can have one set, called 'default'; load one with"):
        _actor(load(adapter_name="sft")).build(seed=0)
    # In the place of a model, a folder of adapters has neither a configuration nor, often, a tokenizer.
    base, adapters, both = folders.values()
    for trained, way_out in ((True, f"'{adapters}'"), (False, f"{{'actor': '{adapters}'}}")):
        expected = f"actor='{adapters}' holds adapters of a base; give actor='{base}', peft_config={way_out}"
        with pytest.raises(ConfigError, match=re.escape(expected)):
            Role(name="actor", source=adapters, trained=trained)
    shutil.copytree(base, both)
    shutil.copytree(adapters, both, dirs_exist_ok=True)
    assert not adapted_layers(_actor(both, trained=False).build(seed=0))
    with pytest.raises(ConfigError, match="holds adapters, too; move them to a folder for peft_config"):
        _actor(both).build(seed=0)


def test_the_reference_is_the_start_of_a_stage_that_continues_adapters(tmp_path: Path) -> None:
    base, folder = str(tmp_path / "base"), str(tmp_path / "adapters")
    tiny_model("llama").save_pretrained(base)
    byte_tokenizer().save_pretrained(base)
    saved = _save_adapters(Path(folder), AutoModelForCausalLM.from_pretrained(base))

    def pair(actor: Any, **settings: Any) -> Any:
        module = runs.RecordedGRPO(actor, runs.low_tokens, sampling=runs.SAMPLING, kl_coef=0.1, **settings)
        module.configure_model()
        return module

    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder)
    for module in (pair(base, peft_config=folder), pair(loaded)):
        torch.testing.assert_close(_logits(module.actor), _logits(saved), rtol=0, atol=1e-5)
        torch.testing.assert_close(_logits(module.reference), _logits(saved), rtol=0, atol=1e-5)
        assert module.roles()[1].shares is None  # also after its weights were let go
    fresh = get_peft_model(tiny_model("llama"), LoraConfig(target_modules=["q_proj"]))
    for module in (pair(fresh), pair(base, peft_config=folder, reference=base)):  # the base, without a second copy
        assert module.roles()[1].shares == "actor" and not hasattr(module, "reference")


def test_adapters_of_another_base_are_refused(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path / "base")
    _save_adapters(tmp_path / "adapters", tiny_model("llama", hidden_size=32))
    here = tiny_model("llama")
    with pytest.raises(ConfigError, match=r"lora_A.weight has shape \(4, 32\) there and \(4, 64\) here; give the base"):
        _actor(here, tmp_path / "adapters").build(seed=0)
    with pytest.raises(ConfigError, match=r"do not fit actor, a GPTNeoXForCausalLM|not found in the base model"):
        _actor(tiny_model("gpt_neox"), tmp_path / "adapters").build(seed=0)
    _save_adapters(tmp_path / "named", tiny_model("llama"))
    config = json.loads((tmp_path / "named/adapter_config.json").read_text())
    config["base_model_name_or_path"] = "meta-llama/Llama-2-7b-hf"
    (tmp_path / "named/adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"are of the base 'meta-llama/Llama-2-7b-hf', and actor is .*base'; give"):
        _actor(tmp_path / "base", tmp_path / "named").build(seed=0)
    _actor(here, tmp_path / "named").build(seed=0)  # a module does not carry the name of its base


@pytest.mark.parametrize(
    ("peft", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type=IA3 cannot be trained here; use LORA"),
        (_lora(rank=4), "peft_config has no option rank; write those of peft.LoraConfig"),
        (_lora(bias="all"), "peft_config.bias='all' cannot be used here; leave it out"),
        (_lora(target_modules=["nope"]), "Target modules .* not found in the base model.*; name layers of Qwen2For"),
        (_lora(r=0), "actor: peft_config is refused by PEFT: .* is 0; correct that value of peft_config$"),
        (_lora(r=None), "actor: peft_config is refused by PEFT: .*; correct that value of peft_config$"),
        (_lora(r="a"), "actor: peft_config.r='a' is a str; write a whole number"),
        (_lora(lora_alpha="a"), "actor: peft_config.lora_alpha='a' is a str; write a number"),
        (_lora(lora_dropout=-0.1), "actor: peft_config.lora_dropout=-0.1 must lie between 0 and 1"),
        (_lora(modules_to_save=["lm_head"]), "asks to train lm_head whole"),
        (_lora(init_lora_weights="pissa"), "init_lora_weights='pissa' changes the base"),
        (_lora(target_modules=["embed_tokens"]), "model.embed_tokens, a Embedding; adapters are trained in linear"),
        (_lora(target_modules=["lm_head"]), "lm_head, whose weight is also another layer's"),
        ("no/such/adapters/here", "peft_config='no/such/adapters/here' could not be loaded .there is no such folder"),
        ("tests", "peft_config='tests' could not be loaded .the folder has no adapter_config.json"),
    ],
)
def test_adapters_that_cannot_be_trained_are_refused(peft: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _actor(tiny_model("qwen2"), peft).build(seed=0)


def test_a_peft_model_with_other_trained_weights_is_refused_and_merged_if_frozen() -> None:
    for whole in ("lm_head", "embed_tokens"):
        config = LoraConfig(target_modules=["q_proj"], modules_to_save=[whole], init_lora_weights=False)
        wrapped = get_peft_model(tiny_model("qwen2"), config)
        with torch.no_grad():
            for name, parameter in wrapped.named_parameters():
                if "modules_to_save" in name:
                    parameter.mul_(1.5)
        with pytest.raises(
            ConfigError, match=rf"modules_to_save asks to train \S*{whole} whole, and only a classifier"
        ):
            _actor(wrapped).build(seed=0)
        frozen = _actor(wrapped, name="reference", trained=False).build(seed=0)
        torch.testing.assert_close(_logits(frozen), _logits(wrapped), rtol=0, atol=1e-5)
        assert not any("original_module" in name for name, _ in frozen.named_parameters())


def test_a_head_that_peft_copied_is_trained_in_its_place() -> None:
    wrapped = get_peft_model(tiny_scorer("llama"), LoraConfig(task_type="SEQ_CLS", target_modules=["q_proj"]))
    role = _actor(wrapped, name="reward", task="sequence_classification")
    trained = {name for name, parameter in role.build(seed=0).named_parameters() if parameter.requires_grad}
    assert {name for name in trained if "lora_" not in name} == {"score.weight"}
    assert torch.equal(_logits(role.build(seed=0)), _logits(wrapped))
    assert describe_model(role.describe()) == describe_model(role.build(seed=0))


def test_adapters_over_resized_embeddings_are_refused_unless_the_base_was_saved(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    model.resize_token_embeddings(131, mean_resizing=False)
    _actor(model).build(seed=0)  # full training writes the whole model
    model.save_pretrained(tmp_path / "resized")
    resized = AutoModelForCausalLM.from_pretrained(tmp_path / "resized")
    assert _actor(resized, _lora()).build(seed=0).config.vocab_size == 131
    adapted = get_peft_model(copy.deepcopy(model), LoraConfig(target_modules=["q_proj"]))
    for source, peft in ((model, _lora()), (adapted, None)):
        with pytest.raises(ConfigError, match=r"have 131 rows and those of its base '\S+base' 128, and adapters are"):
            _actor(source, peft).build(seed=0)


def test_fresh_adapters_in_a_frozen_role_and_second_adapters_are_refused() -> None:
    with pytest.raises(ConfigError, match="fresh adapters change nothing; give a folder of saved ones"):
        _actor(tiny_model("llama"), _lora(), trained=False).build(seed=0)
    wrapped = get_peft_model(tiny_model("llama"), LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(ConfigError, match="has adapters in it already; leave its peft_config out"):
        _actor(wrapped, _lora()).build(seed=0)


def test_a_configuration_holds_for_every_trained_role_or_by_role() -> None:
    adapted = {role.name: role.has_adapters for role in runs.ppo(peft_config=_lora()).roles()}
    assert adapted == {"actor": True, "critic": True, "reference": False}
    adapted = {role.name: role.has_adapters for role in runs.ppo(peft_config={"critic": _lora()}).roles()}
    assert adapted == {"actor": False, "critic": True, "reference": False}
    with pytest.raises(ConfigError, match="peft_config names judge, and the roles are actor, critic, reference; write"):
        runs.ppo(peft_config={"judge": _lora()}).configure_model()
    for options, shares in (({"peft_config": _lora()}, "actor"), ({}, None)):
        module = runs.RecordedGRPO(tiny_model("llama"), runs.low_tokens, sampling=runs.SAMPLING, kl_coef=0.1, **options)
        module.configure_model()
        assert module.roles()[1].shares == shares
        assert hasattr(module, "reference") == (shares is None)
    with pytest.raises(
        ConfigError, match="reference shares the base of 'actor' and is trained, averages a role or has"
    ):
        _actor(tiny_model("llama"), name="reference", shares="actor")


def test_dora_is_refused_in_layouts_that_cut_its_layers() -> None:
    dora, lora = (
        describe_model(_actor(tiny_model("qwen3"), _lora(**KINDS[kind])).describe()) for kind in ("dora", "lora")
    )
    with pytest.raises(LayoutError) as caught:
        ModelLayout(dora, Layout.parse("dp2.tp2"))
    assert str(caught.value) == (
        "tp=2 is impossible for this model: model.layers.0.self_attn.q_proj.lora_magnitude_vector: DoRA divides by the "
        "norms of whole weights, and model.layers.0.self_attn.q_proj is cut (colwise); leave use_dora out; use tp=1"
    )
    assert dora.tensor_parallel_degrees(4) == (1,)  # a search does not propose it, either
    for spec, layout in ((dora, "pp2.fsdp2"), (lora, "dp2.tp2")):
        ModelLayout(spec, Layout.parse(layout))


@pytest.mark.parametrize(
    "settings", [{"quant_method": "gptq", "bits": 4}, BitsAndBytesConfig(load_in_8bit=True)],
    ids=["as a file has it", "as transformers has it"],
)  # fmt: skip
def test_other_bases_than_4_bit_ones_of_bitsandbytes_are_refused(settings: Any) -> None:
    config: PreTrainedConfig = tiny_model("llama").config
    config.quantization_config = settings
    for attempt in (lambda: _actor(config).describe(), lambda: _actor(config, _lora()).build(seed=0)):
        with pytest.raises(
            ConfigError, match=r"actor is quantized \((gptq|bitsandbytes)\).*give a base in bfloat16 or float32"
        ):
            attempt()
