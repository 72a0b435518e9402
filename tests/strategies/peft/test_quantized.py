"""Adapters over 4-bit weights train in every layout as over the same weights in float32, and leave them unchanged."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from torch.optim import SGD
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from lightning_realloc.algorithms.base.role import Role
from lightning_realloc.callbacks import SaveHuggingFace
from lightning_realloc.errors import CheckpointError
from lightning_realloc.runtime.model.quantized import quantized_layers
from lightning_realloc.strategies import ReallocStrategy
from lightning_realloc.strategies.checkpoints.export import export_checkpoint
from lightning_realloc.strategies.checkpoints.stored_metadata import stored_tensors
from tests.models import byte_tokenizer, tiny_model
from tests.strategies import runs
from tests.strategies.peft.peft_runs import LORA, ChangeOfPlan
from tests.strategies.runs import calls
from tests.workers import WorkerPool

pytest.importorskip("bitsandbytes", reason="4-bit weights need the package bitsandbytes")

NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
GREEDY = replace(runs.SAMPLING, top_k=1)
LEARNING_RATE = 0.2
TOKENS = torch.arange(3, 20)[None]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a tiny model."""
    folder = tmp_path_factory.mktemp("base")
    tiny_model("llama").save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def _loaded(base: Path) -> Any:
    """Return the model as transformers quantizes it, which computes without packing its weights anew."""
    model = AutoModelForCausalLM.from_pretrained(
        base, dtype=torch.float32, quantization_config=BitsAndBytesConfig(**NF4)
    )
    for layer in quantized_layers(model).values():
        layer.support_avx512bf16_for_cpu = False
    return model


def _bytes(model: nn.Module) -> dict[str, list[Tensor]]:
    """Return copies of the 4-bit weights and their scales."""
    found = {}
    for name, layer in quantized_layers(model).items():
        scales = layer.weight.quant_state
        tensors = (layer.weight.data, scales.absmax, scales.offset, scales.state2.absmax)
        found[name.replace(".base_layer", "")] = [tensor.clone() for tensor in tensors]
    return found


def _is_unchanged(model: nn.Module, base: Path) -> bool:
    ours, loaded = _bytes(model), _bytes(_loaded(base))
    return bool(ours) and all(
        torch.equal(one, other)
        for name in ours  # a pipeline stage has some of the layers
        for one, other in zip(ours[name], loaded[name], strict=True)
    )


def _grpo(actor: Any, **settings: Any) -> Any:
    settings = {"sampling": runs.SAMPLING, "optimizer": partial(SGD, lr=0.5), "kl_coef": 0.1, **settings}
    return runs.RecordedGRPO(actor, runs.low_tokens, tokenizer=byte_tokenizer(), peft_config=LORA, **settings)


def _train_grpo(base: Path, plans: list[Any], settings: dict[str, Any]) -> list[tuple[runs.Outcome, bool, int]]:
    """Train under each plan; return outcomes, whether 4-bit weights stayed the same, and how many copies there are."""
    found, world_size = [], runs.world_size()
    for plan, callbacks in plans:
        module = _grpo(base, quantization_config=NF4, **settings)
        outcome = runs.train(module, ReallocStrategy(plan), world_size, runs.Batches(3), callbacks=callbacks)
        pool = module.trainer.strategy.pool
        models = [pool.home("actor").model, pool.target("actor.generate").model, pool.target("reference.infer").model]
        layers = [list(quantized_layers(model).values()) for model in models]
        places = {layer.weight.data_ptr() for some in layers for layer in some}
        unchanged = all(_is_unchanged(model, base) for model in models)
        found.append((outcome, unchanged, len(places) - max(map(len, layers))))
    return found


def _train_unpacked(base: Path) -> runs.Outcome:
    """Train adapters over the same weights in float32."""
    return runs.train(_grpo(_loaded(base).dequantize()), ReallocStrategy("heuristic"), 1, runs.Batches(3))


PLANS = [
    (calls(actor_train="dp2", actor_generate="dp2", reference_infer="dp2"), []),
    (calls(actor_train="fsdp2", actor_generate="dp1@1", reference_infer="dp2"), []),
    (calls(actor_train="pp2", actor_generate="dp2", reference_infer="fsdp2"), []),
    ("heuristic", [ChangeOfPlan(calls(actor_train="dp2", actor_generate="dp2", reference_infer="dp1@0"))]),
]


def test_grpo_over_4_bit_weights_trains_as_over_the_same_weights_in_float32(workers: WorkerPool, base: Path) -> None:
    expected: Any = workers.run(_train_unpacked, base, world_size=1, init_process_group=False, deadline_s=90.0)[0]
    alone: Any = workers.run(
        _train_grpo, base, [("heuristic", [])], {}, world_size=1, init_process_group=False, deadline_s=90.0
    )
    together: Any = workers.run(_train_grpo, base, PLANS, {}, world_size=2, init_process_group=False, deadline_s=150.0)
    trained = {name: weight for name, weight in expected.weights.items() if "lora_" in name}
    for outcome, *_ in (*alone[0], *together[0]):
        assert outcome.tokens == expected.tokens
        for ours, theirs in zip(outcome.logged, expected.logged, strict=True):
            assert ours == pytest.approx(theirs, abs=2e-5, rel=1e-4)
        adapters = {name: weight for name, weight in outcome.weights.items() if "lora_" in name}
        assert runs.largest_difference(adapters, trained) <= 1e-5
    for outcomes in (*alone, *together):  # on every rank
        for _, unchanged, copies in outcomes:
            assert unchanged
            assert copies == 0


def test_greedy_tokens_equal_those_of_transformers(workers: WorkerPool, base: Path) -> None:
    ((outcome, _, _),) = workers.run(
        _train_grpo, base, [("heuristic", [])], {"sampling": GREEDY}, world_size=1, init_process_group=False
    )[0]
    actor: Any = Role(name="actor", source=base, trained=True, peft=LORA, quantization=NF4).build(seed=0).eval()
    (prompts, *_) = runs.Batches(3)
    for index, prompt in enumerate(prompts.ragged("prompt_ids").split()):
        ids = actor.generate(
            prompt[None], attention_mask=torch.ones_like(prompt[None]), do_sample=False,
            max_new_tokens=GREEDY.max_new_tokens, eos_token_id=list(GREEDY.stop_token_ids), pad_token_id=0,
        )  # fmt: skip
        assert outcome.tokens[0][2 * index] == ids[0, len(prompt) :].tolist()


def _train_sft(base: Path, plan: Any) -> tuple[runs.Outcome, bool]:
    world_size = runs.world_size()
    module = runs.sft(
        actor=base, optimizer=partial(SGD, lr=LEARNING_RATE), peft_config=LORA, quantization_config=NF4,
        train_options=runs.options(max_grad_norm=None),
    )  # fmt: skip
    outcome = runs.train(module, plan, world_size, runs.Batches(4, responses=True))
    return outcome, _is_unchanged(module.actor, base)


@pytest.mark.parametrize(("world_size", "plan"), [(1, "heuristic"), (2, calls(actor_train="dp2"))])
def test_losses_and_steps_of_sft_equal_a_loop_by_hand(
    workers: WorkerPool, base: Path, world_size: int, plan: Any
) -> None:
    outcome, unchanged = workers.run(
        _train_sft, base, plan, world_size=world_size, init_process_group=False, deadline_s=90.0
    )[0]
    assert unchanged
    options = {name: value for name, value in LORA.items() if name != "peft_type"}
    model = get_peft_model(_loaded(base), LoraConfig(**options))
    begun = Role(name="actor", source=base, trained=True, peft=LORA, quantization=NF4).build(seed=0)
    ours = dict(model.base_model.model.named_parameters())
    with torch.no_grad():
        for name, weight in begun.named_parameters():
            ours[name].copy_(weight)
    optimizer = SGD([parameter for parameter in model.parameters() if parameter.requires_grad], lr=LEARNING_RATE)
    for logged, batch in zip(outcome.logged, runs.Batches(4, responses=True), strict=True):
        rows = zip(batch.ragged("prompt_ids").split(), batch.ragged("response_ids").split(), strict=True)
        pairs = [(torch.cat((prompt, response)), len(prompt)) for prompt, response in rows]
        nll = [-model(input_ids=ids[None]).logits[0, length - 1 : -1].log_softmax(-1).gather(1, ids[length:, None])
               for ids, length in pairs]  # fmt: skip
        mean = torch.cat(nll).mean()
        assert mean.item() == pytest.approx(logged["actor/loss"], abs=1e-5)
        mean.backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, weight in outcome.weights.items():
        if "lora_" in name:
            torch.testing.assert_close(ours[name].detach(), weight, rtol=0, atol=1e-5)


def _fit(folder: Path, base: Path, ckpt: Path | None, count: int) -> dict[str, Tensor]:
    """Train; the first run writes all kinds of files."""
    world_size, strategy = runs.world_size(), ReallocStrategy("heuristic")
    writers = [SaveHuggingFace(folder / "adapters"), SaveHuggingFace(folder / "merged", merge=True)]
    trainer = runs.trainer(strategy, world_size, callbacks=[] if ckpt else writers, max_epochs=count)
    trainer.fit(_grpo(base, quantization_config=NF4), runs.Batches(2), ckpt_path=ckpt)
    if ckpt is None:
        trainer.save_checkpoint(folder / "run.ckpt")
    return strategy.full_weights("actor")


@torch.no_grad()
def _logits(model: Any) -> Tensor:
    logits: Tensor = model.eval()(input_ids=TOKENS).logits
    return logits


def test_checkpoints_and_files_hold_adapters_alone(workers: WorkerPool, base: Path, tmp_path: Path) -> None:
    weights: Any = workers.run(_fit, tmp_path, base, None, 1, world_size=2, init_process_group=False, deadline_s=120.0)[
        0
    ]
    stored = list(stored_tensors(tmp_path / "run.ckpt"))
    assert len(stored) == 28 and all("lora_" in name for name in stored)
    exported = export_checkpoint(tmp_path / "run.ckpt", tmp_path / "exported")
    assert not (exported / "config.json").exists()
    for folder in (exported, tmp_path / "adapters"):
        read = PeftModel.from_pretrained(_loaded(base), folder)
        assert len(quantized_layers(read)) == 14
        for name, weight in weights.items():
            if "lora_" in name:
                assert torch.equal(read.get_parameter(f"base_model.model.{name}"), weight)
    # A merge takes the base from its folder, where it is not quantized.
    plain = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), exported)
    merged = export_checkpoint(tmp_path / "run.ckpt", tmp_path / "whole", merge=True)
    for folder in (merged, tmp_path / "merged"):
        torch.testing.assert_close(
            _logits(AutoModelForCausalLM.from_pretrained(folder)), _logits(plain), rtol=0, atol=1e-5
        )
    _loaded(base).save_pretrained(tmp_path / "packed")
    with pytest.raises(CheckpointError, match=r"packed' holds 4-bit weights, and a merge would round them again"):
        export_checkpoint(tmp_path / "run.ckpt", tmp_path / "other", merge=True, base=tmp_path / "packed")

    two = workers.run(_fit, tmp_path / "two", base, None, 2, world_size=1, init_process_group=False)[0]
    resumed = workers.run(_fit, tmp_path, base, tmp_path / "run.ckpt", 2, world_size=1, init_process_group=False)[0]
    assert runs.largest_difference(resumed, two) <= 1e-4
    assert runs.largest_difference(resumed, weights) > 1e-3


def _train_ppo(base: Path) -> tuple[dict[str, int], bool, bool]:
    module = runs.ppo(
        actor=base, critic=base, peft_config=LORA, quantization_config={"critic": NF4, "reference": NF4},
        reference=base, optimizer=partial(SGD, lr=0.1),
    )  # fmt: skip
    runs.train(module, "heuristic", 1, runs.Batches(2))
    strategy = module.trainer.strategy
    models = {role: strategy.pool.home(role).model for role in ("actor", "critic", "reference")}
    unchanged = all(_is_unchanged(models[role], base) for role in ("critic", "reference"))
    counts = {role: len(quantized_layers(model)) for role, model in models.items()}
    strategy.release("reference")
    released = quantized_layers(module.reference).values()
    return counts, unchanged, all(layer.weight.is_meta for layer in released)


def test_a_critic_and_a_frozen_role_can_have_4_bit_weights(workers: WorkerPool, base: Path) -> None:
    ((counts, unchanged, is_freed),) = workers.run(
        _train_ppo, base, world_size=1, init_process_group=False, deadline_s=90.0
    )
    assert counts == {"actor": 0, "critic": 14, "reference": 14}
    assert unchanged
    assert is_freed
