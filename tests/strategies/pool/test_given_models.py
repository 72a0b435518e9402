"""A model given as a module is copied once, and is neither a child nor part of checkpoints."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn

from lightning_realloc.algorithms.base.loaded_weights import without_weights
from lightning_realloc.algorithms.base.module import MultiModelModule
from lightning_realloc.algorithms.base.role import Role
from lightning_realloc.algorithms.sft import SFT
from lightning_realloc.errors import ConfigError
from lightning_realloc.runtime.parallel.model_spec import describe_model
from tests.matrices import matrix
from tests.models import tiny_model, tiny_scorer
from tests.strategies import runs
from tests.strategies.checkpoints.checkpoint_runs import forget_checksums
from tests.strategies.peft.peft_runs import LORA
from tests.strategies.runs import Batches

STEPS_BYTES = 60_000
"""More bytes than ``meta.pt`` needs, and a fraction of a tiny model."""


def weight_bytes() -> int:
    """Return the bytes of all parameters of modules in this process."""
    gc.collect()
    modules = [found for found in gc.get_objects() if issubclass(type(found), nn.Module)]
    held = {id(p): p.nbytes for m in modules for p in m._parameters.values() if p is not None and not p.is_meta}
    return sum(held.values())


class CountCopies(Callback):
    """Records the bytes of weights once the models are set up."""

    def __init__(self) -> None:
        self.noted = 0

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Record the bytes."""
        self.noted = weight_bytes()


def given(algorithm: str, **settings: Any) -> MultiModelModule:
    """Return an algorithm whose roles are all given as modules, without other references to them."""
    if algorithm == "sft":
        return runs.sft(**settings)
    settings = {"reward": tiny_scorer("llama"), "reference": tiny_model("llama", seed=1), **settings}
    return runs.ppo(**settings) if algorithm == "ppo" else runs.grpo(**settings)


@pytest.mark.parametrize("algorithm", matrix(["sft", "grpo", "ppo"], "ppo"))
def test_given_models_are_stored_once_and_left_out_of_checkpoints(algorithm: str, tmp_path: Path) -> None:
    given(algorithm)  # `tiny_model` keeps the models that it has built
    before, copies = weight_bytes(), CountCopies()
    module = given(algorithm)
    roles = {role.name for role in module.roles()}
    assert list(module.parameters()) == []
    trainer = runs.trainer("realloc", 1, callbacks=[copies])
    trainer.fit(module, Batches(1, responses=algorithm == "sft"))
    trainer.save_checkpoint(tmp_path / "run.ckpt")

    assert copies.noted - before == sum(parameter.nbytes for parameter in module.parameters())
    assert {name.partition(".")[0] for name, _ in module.named_parameters()} == roles
    meta = tmp_path / "run.ckpt" / "meta.pt"
    assert meta.stat().st_size < STEPS_BYTES
    assert not any("weight" in name for name in torch.load(meta, weights_only=True)["state_dict"])


def test_the_given_object_is_unchanged_and_a_second_fit_continues_training() -> None:
    mine = tiny_model("llama")
    begun = {name: tensor.clone() for name, tensor in mine.state_dict().items()}
    module = runs.sft(actor=mine)
    first = runs.train(module, "heuristic", 1, Batches(1, responses=True))
    second = runs.train(module, "heuristic", 1, Batches(1, responses=True))

    assert runs.largest_difference(mine.state_dict(), begun) == 0
    assert first.logged[0]["actor/loss"] > second.logged[0]["actor/loss"] + 0.01


def test_a_checkpoint_that_holds_given_models_still_loads(tmp_path: Path) -> None:
    folder = tmp_path / "run.ckpt"
    trainer = runs.trainer("realloc", 1)
    trainer.fit(runs.sft(), Batches(1, responses=True))
    trainer.save_checkpoint(folder)
    meta = torch.load(folder / "meta.pt", weights_only=True)
    earlier = {f"_actor_source.{name}": tensor for name, tensor in tiny_model("llama").state_dict().items()}
    torch.save({**meta, "state_dict": {**meta["state_dict"], **earlier}}, folder / "meta.pt")
    forget_checksums(folder)

    resumed, module = runs.trainer("realloc", 1, max_epochs=2), runs.sft()
    resumed.fit(module, Batches(1, responses=True), ckpt_path=folder)
    assert resumed.global_step == 2
    assert not any("source" in name for name in module.state_dict())


class KeepsItself(SFT):
    """An algorithm of a user that keeps its model as an attribute."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, tokenizer=None)
        self.mine = model

    def roles(self) -> tuple[Role, ...]:
        """Return one role, whose model is the attribute."""
        return (Role(name="actor", source=self.mine, trained=True),)


def test_an_attribute_that_a_role_is_built_from_is_not_a_child() -> None:
    module = KeepsItself(tiny_model("llama"))
    module.configure_model()
    assert [name for name, _ in module.named_children()] == ["actor"]
    assert isinstance(module.mine, nn.Module)


def test_a_given_model_without_weights_describes_the_same_role() -> None:
    partly_frozen = tiny_model("llama")
    partly_frozen.model.embed_tokens.requires_grad_(False)
    adapted = Role(name="actor", source=tiny_model("llama"), trained=True, peft=LORA).build(seed=0)
    for model in (tiny_model("gpt2"), partly_frozen, adapted):
        role, left = (Role(name="actor", source=m, trained=True) for m in (model, without_weights(model)))
        assert describe_model(left.describe()) == describe_model(role.describe())
        assert left.frozen_parameters(left.describe()) == role.frozen_parameters(role.describe())
        assert left.has_adapters == role.has_adapters


def test_building_from_a_model_without_weights_is_refused() -> None:
    left = without_weights(tiny_model("llama"))
    with pytest.raises(ConfigError, match="actor is a module on the meta device, which holds no weights"):
        Role(name="actor", source=left, trained=True).build(seed=0)
