from __future__ import annotations

import errno
import json
import os
import shutil
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from lightning_realloc.algorithms.grpo import GRPO
from lightning_realloc.algorithms.reward_model import RewardModel
from lightning_realloc.callbacks import SaveHuggingFace
from lightning_realloc.errors import CheckpointError, ConfigError
from lightning_realloc.strategies import ReallocStrategy
from lightning_realloc.strategies.checkpoints.export import check_output, export_checkpoint
from lightning_realloc.strategies.checkpoints.gather import gather_weights
from lightning_realloc.strategies.checkpoints.hf_folder import parse_dtype, write_running_model
from tests.algorithms.test_loaded_weights import with_a_head_of_its_own
from tests.devices import CPU_ALONE
from tests.matrices import matrix
from tests.models import byte_tokenizer, tiny_model, tiny_scorer
from tests.strategies import runs
from tests.strategies.algorithms import preferences
from tests.strategies.checkpoints.checkpoint_runs import Part, contents, run_parts
from tests.strategies.peft.peft_runs import LORA
from tests.workers import WorkerPool


def _load(folder: Path) -> dict[str, Tensor]:
    """Read the weights with transformers."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def _equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def _weights_of(checkpoint: Path, role: str = "actor") -> dict[str, Tensor]:
    prefix = f"model/{role}/"
    return {n.removeprefix(prefix): w for n, w in contents(checkpoint).items() if n.startswith(prefix)}


# ---- from a checkpoint
UNEVEN_HEADS = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3}
"""Sizes that two ranks divide into two groups of heads and one."""


@pytest.mark.parametrize(
    ("family", "sizes"),
    matrix(
        [(family, {}) for family in ("llama", "qwen2", "gemma", "phi3", "gpt2", "gpt_neox")]
        + [("llama", UNEVEN_HEADS)],
        ("llama", UNEVEN_HEADS),
        ("phi3", {}),  # fused
        ("gpt2", {}),  # transposed
    ),
)
def test_an_export_is_read_back_bit_by_bit(
    workers: WorkerPool, tmp_path: Path, family: str, sizes: dict[str, int]
) -> None:
    layout = "fsdp2" if family == "gpt2" else "tp2"  # gpt2 has no tensor-parallel plan
    part = Part(runs.calls(actor_train=layout), 1, save=tmp_path / "run.ckpt", family=family, sizes=sizes)
    workers.run(run_parts, [part], 2, world_size=2, init_process_group=False)

    folder = export_checkpoint(tmp_path / "run.ckpt", tmp_path / "model")

    exported = _load(folder)
    assert _equal(exported, _weights_of(tmp_path / "run.ckpt"))
    untrained = dict(tiny_model(family, **sizes).named_parameters())
    assert not any(torch.equal(exported[name], untrained[name]) for name in untrained), "the test trained nothing"
    config = AutoConfig.from_pretrained(folder)
    assert config.architectures == [type(tiny_model(family)).__name__]
    assert json.loads((folder / "config.json").read_text())["dtype"] == "float32"
    assert AutoTokenizer.from_pretrained(folder).decode(byte_tokenizer()("23+4")["input_ids"]) == "23+4"
    assert not (folder / "buffers.safetensors").exists()


def test_an_export_may_be_cast_and_overwritten(workers: WorkerPool, tmp_path: Path) -> None:
    part = Part("static", 1, save=tmp_path / "run.ckpt")
    workers.run(run_parts, [part], 2, world_size=2, init_process_group=False)

    export_checkpoint(tmp_path / "run.ckpt", tmp_path / "model")
    export_checkpoint(tmp_path / "run.ckpt", tmp_path / "model", dtype=torch.bfloat16)

    cast = {name: weight.bfloat16() for name, weight in _weights_of(tmp_path / "run.ckpt").items()}
    assert _equal(load_file(tmp_path / "model" / "model.safetensors"), cast)
    assert json.loads((tmp_path / "model" / "config.json").read_text())["dtype"] == "bfloat16"
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "model").dtype == torch.bfloat16


class Scorer(nn.Module):
    """A model without an AutoModel class."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = tiny_model("llama")
        self.config = self.inner.config

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the inner model."""
        return self.inner(*args, **kwargs)


def _save_unusual(folder: Path, world_size: int) -> str:
    """Save a model from outside transformers, and return SaveHuggingFace's error before training."""
    fitted = runs.trainer(ReallocStrategy("static"), world_size, max_steps=1)
    fitted.fit(runs.sft(actor=Scorer()), runs.Batches(1, responses=True))
    fitted.save_checkpoint(folder)
    callback = SaveHuggingFace(folder.with_name("model"))
    refused = runs.trainer(ReallocStrategy("static"), world_size, max_steps=1, callbacks=[callback])
    try:
        refused.fit(runs.sft(actor=Scorer()), runs.Batches(1, responses=True))
    except CheckpointError as error:
        assert refused.global_step == 0
        return str(error)
    return ""


def test_models_that_cannot_be_exported_are_refused(workers: WorkerPool, tmp_path: Path) -> None:
    checkpoint, unusual = tmp_path / "run.ckpt", tmp_path / "unusual.ckpt"
    plan = runs.calls(actor_generate="dp2", reference_infer="dp2", actor_train="dp2")
    part = Part(plan, 1, save=checkpoint, algorithm="grpo")
    workers.run(run_parts, [part], 2, world_size=2, init_process_group=False)
    refusal = workers.run(_save_unusual, unusual, 1, world_size=1, init_process_group=False)[0]
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    (tmp_path / "file").write_text("")
    (tmp_path / "killed" / ".partial").mkdir(parents=True)
    check_output(tmp_path / "killed")  # the next export replaces it

    assert "no transformers PreTrainedModel" in refusal
    for arguments, message in (
        ((checkpoint, tmp_path / "new", "reference"), "no weights of 'reference': it was not trained"),
        ((checkpoint, tmp_path / "new", "critic"), "no weights of 'critic': it has no such role"),
        ((checkpoint, tmp_path / "full", "actor"), "no earlier export that could be overwritten"),
        ((checkpoint, tmp_path / "file", "actor"), "is a file"),
        ((checkpoint, tmp_path / "file" / "model", "actor"), f"cannot be written: Not a directory at {tmp_path}"),
        ((unusual, tmp_path / "new", "actor"), "Scorer, which is no transformers PreTrainedModel"),
        ((tmp_path / "full", tmp_path / "new", "actor"), "a folder without it"),
    ):
        source, target, role = arguments
        with pytest.raises(CheckpointError, match=message):
            export_checkpoint(source, target, role=role)
    assert not (tmp_path / "new").exists()
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["notes.txt"]


# ---- from a run
def _fit_and_write(folder: Path, layout: str, world_size: int) -> dict[str, Tensor]:
    callbacks = [
        SaveHuggingFace(folder, every_n_steps=2),
        SaveHuggingFace(folder / "half", every_n_epochs=1, at_end=False, dtype="bfloat16"),
    ]
    plan = runs.calls(actor_train=layout)
    actor = tiny_model("qwen2")
    outcome = runs.train(runs.sft(actor=actor), plan, world_size, runs.Batches(3, responses=True), callbacks=callbacks)
    return outcome.weights


@pytest.mark.parametrize("layout", matrix(["fsdp2.tp2", "tp4"], "fsdp2.tp2"))
def test_a_run_writes_models_during_training(workers: WorkerPool, tmp_path: Path, layout: str) -> None:
    weights, *others = workers.run(_fit_and_write, tmp_path / "out", layout, 4, init_process_group=False)

    exported = _load(tmp_path / "out")
    assert _equal(exported, {name: weights[name] for name in exported})
    assert set(weights) - set(exported) == {"lm_head.weight"}  # tied, so not a separate parameter
    assert others == [{}, {}, {}]
    names = _names(tmp_path / "out")
    assert {"config.json", "model.safetensors", "tokenizer.json", "generation_config.json", "step-2"} <= set(names)
    assert _names(tmp_path / "out" / "half") == ["step-3"]
    halved = _load(tmp_path / "out" / "half" / "step-3")
    assert _equal(halved, {name: weight.bfloat16() for name, weight in exported.items()})


def _refused_folder(callback: Callback) -> str:
    trainer = runs.trainer(ReallocStrategy("static"), 2, max_steps=1, enable_checkpointing=True, callbacks=[callback])
    try:
        trainer.fit(runs.sft(), runs.Batches(1, responses=True))
    except CheckpointError as error:
        return f"step {trainer.global_step}: {error}"
    return "not refused"


def test_a_folder_that_cannot_be_made_is_refused_before_the_first_step(workers: WorkerPool, tmp_path: Path) -> None:
    place = tmp_path / "file"
    place.touch()
    message = f"{place / 'out'} cannot be written: Not a directory at {place}; give another folder"
    for callback in (SaveHuggingFace(place / "out"), ModelCheckpoint(place / "out")):
        refused = workers.run(_refused_folder, callback, world_size=2, init_process_group=False)
        assert refused == [f"step 0: {type(callback).__name__}: {message}"] * 2


def _write_on_a_full_disk(folder: Path) -> tuple[str, list[str]]:
    """Return the error of writing a model after its weights, and the files then left."""

    def fail(source: Path, target: Path) -> None:
        raise OSError(28, "No space left on device", str(target))

    before, shutil.copyfile = shutil.copyfile, fail
    try:
        runs.trainer(ReallocStrategy("static"), 1, max_steps=1, callbacks=[SaveHuggingFace(folder)]).fit(
            runs.sft(), runs.Batches(1, responses=True)
        )
    except CheckpointError as error:
        return str(error), sorted(str(path.relative_to(folder.parent)) for path in folder.parent.rglob("*"))
    finally:
        shutil.copyfile = before
    return "", []


def test_a_first_export_that_fails_leaves_no_folder(workers: WorkerPool, tmp_path: Path) -> None:
    ((error, left),) = workers.run(_write_on_a_full_disk, tmp_path / "new", world_size=1, init_process_group=False)
    assert error.startswith(f"{tmp_path / 'new'} cannot be written: No space left on device; earlier files there are")
    assert left == []


def _names(folder: Path) -> Sequence[str]:
    return sorted(path.name for path in folder.iterdir())


def _gather_in_windows(layout: str, world_size: int) -> list[dict[str, Tensor]]:
    strategy = ReallocStrategy(runs.calls(actor_train=layout))
    fitted = runs.trainer(strategy, world_size, max_steps=1)
    fitted.fit(runs.sft(actor=tiny_model("qwen2")), runs.Batches(1, responses=True))
    home, facts = strategy.pool.home("actor"), strategy._placed.facts
    return [gather_weights(home, facts, window_elements=most) for most in (1, 10_000, 10**9)]


@CPU_ALONE
def test_weights_are_gathered_a_few_at_a_time(workers: WorkerPool) -> None:
    first, *others = workers.run(_gather_in_windows, "fsdp2", 2, world_size=2, init_process_group=False)

    one_by_one, some, at_once = first
    assert len(at_once) > 20 and torch.equal(at_once["lm_head.weight"], at_once["model.embed_tokens.weight"])
    assert _equal(one_by_one, at_once) and _equal(some, at_once)
    assert others == [[{}, {}, {}]]


def _train_two_heads(base: Path, out: Path) -> dict[str, dict[str, Tensor]]:
    """Train a model that is tied only in its config, fully and with adapters; write it; return the trained weights."""
    found = {}
    for kind, settings in (("whole", {}), ("adapted", {"peft_config": {**LORA, "exclude_modules": ["lm_head"]}})):
        strategy = ReallocStrategy("static")
        writer = SaveHuggingFace(out / f"{kind}-run", merge=kind == "adapted")
        fitted = runs.trainer(strategy, 1, callbacks=[writer])
        fitted.fit(runs.sft(actor=str(base), **settings), runs.Batches(2, responses=True))
        fitted.save_checkpoint(out / f"{kind}.ckpt")
        found[kind] = strategy.full_weights("actor")
    return found


def test_a_head_that_is_tied_only_in_the_config_is_read_back(workers: WorkerPool, tmp_path: Path) -> None:
    base = with_a_head_of_its_own(tmp_path / "base")
    (trained,) = workers.run(_train_two_heads, base, tmp_path, world_size=1, init_process_group=False)
    export_checkpoint(tmp_path / "whole.ckpt", tmp_path / "whole-export")
    export_checkpoint(tmp_path / "adapted.ckpt", tmp_path / "adapted-export", merge=True)
    export_checkpoint(tmp_path / "adapted.ckpt", tmp_path / "adapters")
    tokens = torch.arange(3, 20)[None]
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "adapters")
    whole = AutoModelForCausalLM.from_pretrained(base)  # transformers keeps both weights
    assert not torch.equal(whole.lm_head.weight, trained["whole"]["lm_head.weight"])
    whole.load_state_dict(trained["whole"])
    for model, folders in ((whole, ("whole-run", "whole-export")), (adapted, ("adapted-run", "adapted-export"))):
        for folder in folders:
            read = AutoModelForCausalLM.from_pretrained(tmp_path / folder)
            torch.testing.assert_close(read(tokens).logits, model.eval()(tokens).logits, rtol=0, atol=1e-5)
            assert not read.config.tie_word_embeddings


def _train_one_weight(folder: Path) -> dict[str, Tensor]:
    actor = tiny_model("llama")
    actor.lm_head.weight = actor.model.embed_tokens.weight
    assert not actor.config.tie_word_embeddings
    batches = runs.Batches(2, responses=True)
    return runs.train(runs.sft(actor=actor), "static", 1, batches, callbacks=[SaveHuggingFace(folder)]).weights


def test_a_weight_that_is_tied_only_in_the_model_is_read_back(workers: WorkerPool, tmp_path: Path) -> None:
    (trained,) = workers.run(_train_one_weight, tmp_path, world_size=1, init_process_group=False)
    assert _equal(_load(tmp_path), trained)


def _train_unpadded_scorer(folder: Path, pads_with_end: bool) -> tuple[dict[str, Tensor], list[str]]:
    """Train a reward model whose config has no padding token; return its weights and the warnings about padding."""
    tokenizer, strategy = byte_tokenizer(), ReallocStrategy("static")
    if pads_with_end:
        tokenizer.pad_token = tokenizer.eos_token
    module = RewardModel(tiny_scorer("llama", pad_token_id=None), tokenizer=tokenizer, learning_rate=1e-2)
    fitted = runs.trainer(strategy, 1, callbacks=[SaveHuggingFace(folder / "run")])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fitted.fit(module, preferences.pairs(1))
    fitted.save_checkpoint(folder / "run.ckpt")
    return strategy.full_weights("reward"), [str(w.message) for w in caught if "padding" in str(w.message)]


def test_a_reward_model_is_written_with_the_padding_of_its_tokenizer(workers: WorkerPool, tmp_path: Path) -> None:
    ((weights, warned),) = workers.run(_train_unpadded_scorer, tmp_path, False, world_size=1, init_process_group=False)
    export_checkpoint(tmp_path / "run.ckpt", tmp_path / "exported", role="reward")
    trained = tiny_scorer("llama", pad_token_id=None)
    trained.load_state_dict(weights)
    rows = [[5, 6, 7, 2], [8, 2]]
    alone = torch.cat([trained(torch.tensor([row])).logits for row in rows])
    for folder in (tmp_path / "run", tmp_path / "exported"):
        read, tokenizer = (
            AutoModelForSequenceClassification.from_pretrained(folder),
            AutoTokenizer.from_pretrained(folder),
        )
        batch = tokenizer.pad({"input_ids": rows}, return_tensors="pt")
        torch.testing.assert_close(read(**batch).logits, alone, rtol=0, atol=1e-5)
    assert warned == []


def test_a_padding_token_that_ends_responses_is_not_written(workers: WorkerPool, tmp_path: Path) -> None:
    ((_, warned),) = workers.run(_train_unpadded_scorer, tmp_path, True, world_size=1, init_process_group=False)
    assert AutoConfig.from_pretrained(tmp_path / "run").pad_token_id is None
    assert len(warned) == 1 and "cannot score batches with padding: pad_token='<eos>' of the tokenizer" in warned[0]


def test_models_are_written_where_modes_cannot_be_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    model = tiny_model("qwen3")
    weights = {name: parameter.detach() for name, parameter in model.named_parameters(remove_duplicate=False)}
    monkeypatch.setattr(os, "chmod", refuse)  # as on CIFS
    write_running_model(model, weights, byte_tokenizer(), tmp_path / "model", role="actor")
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {
        file.name for file in (tmp_path / "model").iterdir()
    }


def test_a_tilde_is_the_home_folder() -> None:
    assert SaveHuggingFace("~/models").dirpath == Path.home() / "models"


def test_impossible_intervals_and_dtypes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="every_n_steps=0 must be at least 1"):
        SaveHuggingFace(tmp_path, every_n_steps=0)
    with pytest.raises(CheckpointError, match="dtype='int8' is no floating-point dtype"):
        parse_dtype("int8")
    assert {parse_dtype(given) for given in ("bfloat16", "torch.bfloat16", torch.bfloat16)} == {torch.bfloat16}
    for given in (torch.int8, "torch.nn", 16):
        with pytest.raises(CheckpointError, match=f"dtype={given!r} is no floating-point dtype"):
            parse_dtype(given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("written", "options", "source", "refused"),
    [
        ("base", {}, "base", True),
        ("link", {}, "base", True),
        ("base", {"at_end": False, "every_n_steps": 1}, "base", False),
        ("out", {"every_n_steps": 1}, "out/step-1", True),
        ("out", {}, "out/step-1", False),
        ("out", {}, "base", False),
    ],
)
def test_a_folder_that_a_role_is_loaded_from_is_not_overwritten(
    tmp_path: Path, written: str, options: dict[str, Any], source: str, refused: bool
) -> None:
    for folder in ("base", "out/step-1"):
        tiny_model("llama").config.save_pretrained(tmp_path / folder)
    (tmp_path / "link").symlink_to(tmp_path / "base")
    module = GRPO(tiny_model("llama"), runs.low_tokens, reference=str(tmp_path / source), kl_coef=0.1)
    trainer = runs.trainer(ReallocStrategy("static"), 1)
    expected = pytest.raises(ConfigError, match=r"the source of role 'reference'.*give another dirpath")
    with expected if refused else nullcontext():
        SaveHuggingFace(tmp_path / written, **options).setup(trainer, module, "fit")
    SaveHuggingFace(tmp_path / written, **options).setup(trainer, L.LightningModule(), "fit")  # names no roles
