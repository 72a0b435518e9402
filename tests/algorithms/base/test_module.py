"""The base class of algorithms: models determined by the seed, optimizers named after roles, and calls of roles."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.trainer.states import TrainerFn
from peft import LoraConfig, get_peft_model
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import StepLR
from transformers import PreTrainedModel

from lightning_realloc import DPO, GRPO, OnlineDPO, OnPolicyDistillation, ProcessReward, PromptDataModule, RewardModel
from lightning_realloc.algorithms.base.calls import compute, infer, train
from lightning_realloc.algorithms.base.module import MultiModelModule
from lightning_realloc.algorithms.base.role import Role
from lightning_realloc.algorithms.sft import SFT
from lightning_realloc.dataflow.dataflow import ModelFunctionCall
from lightning_realloc.errors import ConfigError, PlanError
from tests.models import byte_tokenizer, tiny_model
from tests.strategies import runs


def test_models_become_attributes_once() -> None:
    module = runs.grpo()
    assert module.models() == {}
    module.configure_model()
    models = module.models()
    assert list(models) == ["actor", "reference"]
    assert models["actor"] is module.actor
    module.configure_model()
    assert module.models()["actor"] is models["actor"]
    # A reference is frozen and a copy, because two roles may be given the same module.
    assert all(parameter.requires_grad for parameter in module.actor.parameters())
    assert not any(parameter.requires_grad for parameter in module.reference.parameters())
    shared = tiny_model("llama")
    twice = runs.RecordedGRPO(shared, runs.low_tokens, sampling=runs.SAMPLING, kl_coef=0.1)
    twice.configure_model()
    assert twice.actor is not twice.reference
    assert runs.largest_difference(twice.actor.state_dict(), twice.reference.state_dict()) == 0.0


def test_random_weights_follow_from_the_seed_alone() -> None:
    config = tiny_model("llama").config
    modules = []
    for seed in (0, 0, 1):
        torch.rand(3)
        modules.append(SFT(config, seed=seed))
        modules[-1].configure_model()
    first, same, other = (module.actor.state_dict() for module in modules)
    assert runs.largest_difference(first, same) == 0.0
    assert runs.largest_difference(first, other) > 0.01
    assert isinstance(modules[0].actor, PreTrainedModel)
    assert next(modules[0].actor.parameters()).dtype == torch.float32


def test_seeds_default_to_the_one_of_seed_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    data = {"data": [{"prompt": str(n)} for n in range(40)], "batch_size": 40, "tokenizer": byte_tokenizer()}
    module, rows, seeded = runs.grpo(), PromptDataModule(**data), PromptDataModule(**data, seed=3)
    assert (module.seed, rows.seed, runs.grpo(seed=5).seed, seeded.seed) == (0, 0, 5, 3)
    orders = []
    for seed in (7, 8):
        monkeypatch.setenv("PL_GLOBAL_SEED", str(seed))  # Lightning's seed_everything stores it here
        assert (module.seed, runs.grpo(seed=5).seed) == (seed, 5)
        for given in ({}, {"seed": 3}):
            shuffled = PromptDataModule(**data, **given)
            shuffled.setup()
            orders.append(next(iter(shuffled.train_dataloader())).ids.tolist())
    assert orders[0] != orders[2] and orders[1] == orders[3]


def test_held_out_rows_are_determined_by_the_data_modules_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    data = {"data": [{"prompt": str(n)} for n in range(40)], "batch_size": 1, "val_fraction": 0.3}

    def held_out(**settings: Any) -> set[object]:
        module = PromptDataModule(**data, **settings, tokenizer=byte_tokenizer())
        module.setup()
        return {batch.objects("prompt") for batch in module.val_dataloader()}

    found = []
    for seed in ("7", "8"):
        monkeypatch.setenv("PL_GLOBAL_SEED", seed)
        found += [held_out(), held_out(seed=0), held_out(seed=3)]
    assert found[0] == found[1] == found[3] == found[4] and found[2] == found[5] != found[0]


LORA = {"peft_type": "LORA", "r": 2, "target_modules": "all-linear"}


@pytest.mark.parametrize(
    ("module", "rate"),
    [
        (SFT(tiny_model("llama")), 2e-5),
        (SFT(tiny_model("llama"), peft_config=LORA), 2e-4),
        (SFT(tiny_model("llama"), peft_config=LORA, learning_rate=3e-5), 3e-5),
        (RewardModel(tiny_model("llama")), 1e-5),
        (RewardModel(tiny_model("llama"), peft_config=LORA), 1e-4),
        (ProcessReward(tiny_model("llama")), 1e-5),
        (DPO(tiny_model("llama")), 1e-6),
        (OnlineDPO(tiny_model("llama"), runs.low_tokens), 5e-7),
        (GRPO(tiny_model("llama"), runs.low_tokens), 1e-6),
        (GRPO(tiny_model("llama"), runs.low_tokens, peft_config=LORA), 1e-5),
    ],
)
def test_every_algorithm_has_its_own_default_learning_rate(module: Any, rate: float) -> None:
    (role,) = module.dataflow.trained_roles
    assert module.optimizer_of(role).learning_rate == pytest.approx(rate)


def test_optimizers_and_schedules_are_named_after_their_roles() -> None:
    module = runs.grpo(learning_rate=0.25)
    module.configure_model()
    (entry,) = module.configure_optimizers()
    (group,) = entry["optimizer"].param_groups
    assert type(entry["optimizer"]) is AdamW
    assert (group["name"], group["lr"], group["weight_decay"]) == ("actor", 0.25, 0.0)
    assert len(group["params"]) == len(list(module.actor.parameters()))
    assert "lr_scheduler" not in entry
    chosen = runs.sft(optimizer=partial(SGD, lr=0.5), lr_scheduler=partial(StepLR, step_size=3))
    chosen.configure_model()
    (entry,) = chosen.configure_optimizers()
    assert type(entry["optimizer"]) is SGD
    assert type(entry["lr_scheduler"]["scheduler"]) is StepLR
    assert (entry["lr_scheduler"]["interval"], entry["lr_scheduler"]["name"]) == ("step", "lr")


def test_a_model_is_loaded_from_its_folder_with_its_tokenizer(tmp_path: Path) -> None:
    model = tiny_model("llama", seed=4)
    model.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    module = SFT(tmp_path)
    assert module.tokenizer.decode(module.tokenizer("ab").input_ids) == "ab"
    module.configure_model()
    assert runs.largest_difference(module.actor.state_dict(), model.state_dict()) == 0.0


@pytest.mark.parametrize("family", ["qwen2", "llama"])  # transformers makes an empty tokenizer for one of them
def test_a_folder_without_a_tokenizer_is_named_in_the_error(tmp_path: Path, family: str) -> None:
    tiny_model(family).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=rf"tokenizer.*'{tmp_path}'|'{tmp_path}' has no files of a tokenizer.*give "):
        _ = SFT(tmp_path).tokenizer
    assert SFT(tmp_path, tokenizer=byte_tokenizer()).tokenizer("ab").input_ids


def test_models_tokenizers_and_adapters_lie_in_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    tiny_model("llama", vocab_size=259).save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    adapted = get_peft_model(tiny_model("llama", vocab_size=259), LoraConfig(task_type="CAUSAL_LM", r=2))
    adapted.save_pretrained(tmp_path / "adapters")
    for source in ("~/model", Path("~/model")):
        module = SFT(source, peft_config="~/adapters")
        assert module.tokenizer("ab").input_ids == SFT(tmp_path, tokenizer="~/model").tokenizer("ab").input_ids
        (role,) = module.roles()
        assert role.source == type(source)(tmp_path / "model")
        assert role.build(seed=0).num_parameters() == adapted.num_parameters()
    with pytest.raises(ConfigError, match=r"actor='.*/nothing': there is no such folder"):
        SFT("~/nothing").roles()


def test_a_model_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"actor is a function; give a model: .*, as in GRPO\(model, reward\)"):
        GRPO(runs.low_tokens, "tiny")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="actor is a dict; give a model: a Hugging Face name or folder, a config, or"):
        SFT({"name": "tiny"}).roles()  # type: ignore[arg-type]


def test_missing_parts_are_named_in_the_error() -> None:
    with pytest.raises(ConfigError, match="SFT was given no tokenizer, and no model is loaded from a folder or name"):
        _ = SFT(tiny_model("llama")).tokenizer
    with pytest.raises(ConfigError, match=r"actor='no/such/folder': there is no such folder or file in .*; give a Hug"):
        SFT("no/such/folder").configure_model()
    for missing in (lambda: SFT("tinny").configure_model(), lambda: SFT("tinny", tokenizer="tinny")):
        with pytest.raises(ConfigError, match=r"no folder 'tinny' in .*; and: We couldn't connect to .*; give"):
            missing()
    with pytest.raises(ConfigError, match=r"reward='right' could not be .* or a reward function as module:function"):
        GRPO(tiny_model("llama"), "right").roles()[-1].build(seed=0)
    with pytest.raises(NotImplementedError, match="Bare must return its models from roles"):
        Bare().roles()


class Bare(MultiModelModule):
    """An algorithm without roles."""


class Judge(MultiModelModule):
    """An algorithm of one frozen role, without evaluation calls."""

    def roles(self) -> tuple[Role, ...]:
        """Return the one role."""
        return (Role(name="judge", source=tiny_model("llama"), trained=False),)


class Scoring(MultiModelModule):
    """An algorithm with two scorers, one of them optional; it learns from the scores of those it is given."""

    optional_roles = ("second",)

    def __init__(self, *names: str, **settings: Any) -> None:
        super().__init__(**settings)
        self.names = names

    def roles(self) -> tuple[Role, ...]:
        """Return the roles that the test gives."""
        return tuple(Role(name=name, source=tiny_model("llama"), trained=name == "actor") for name in self.names)

    @infer("actor", needs="batch", produces="scores")
    def score(self) -> None:
        """Score."""

    @infer("second", needs="batch", produces="more_scores")
    def score_again(self) -> None:
        """Score with the second role."""

    @compute(needs=("scores", "more_scores"), produces="targets", whole_batch=True)
    def compare(self) -> None:
        """Compare."""

    @train("actor", needs=("batch", "targets"))
    def learn(self) -> None:
        """Learn."""


class Twins(MultiModelModule):
    """Two critics of one source, and a moving average of the second."""

    def __init__(self, source: Any, *names: str) -> None:
        super().__init__(seed=1)
        self.sources = dict.fromkeys(names, source)

    def roles(self) -> tuple[Role, ...]:
        """Return the critics and, if it is named, the average."""
        roles = (self.make_role(name, trained=name != "average", task="token_classification") for name in self.sources)
        return tuple(replace(role, average_of=None if role.trained else "second") for role in roles)

    @train("first", needs="batch")
    def learn(self) -> None:
        """Learn."""

    @train("second", needs="batch")
    def learn_again(self) -> None:
        """Learn with the second critic."""


def test_critics_of_one_source_differ_and_other_roles_equal_the_one_they_follow() -> None:
    given = tiny_model("llama")
    twins = Twins(given, "first", "second")
    twins.configure_model()
    ours, theirs = (dict(critic.named_parameters()) for critic in (twins.first, twins.second))
    assert {name for name in ours if not torch.equal(ours[name], theirs[name])} == {"score.weight"}
    random = Twins(given.config, "first", "second", "average")
    random.configure_model()
    weights = [getattr(random, name).model.layers[0].mlp.up_proj.weight for name in ("first", "second", "average")]
    assert not torch.equal(weights[0], weights[1]) and torch.equal(weights[1], weights[2])
    alone = random.roles()[0].build(seed=1)  # the first one has the seed itself, as a critic without a twin
    assert torch.equal(alone.model.layers[0].mlp.up_proj.weight, weights[0])
    pair = runs.RecordedGRPO(given.config, runs.low_tokens, sampling=runs.SAMPLING, kl_coef=0.1)
    pair.configure_model()
    assert torch.equal(pair.actor.lm_head.weight, pair.reference.lm_head.weight)


def test_calls_of_absent_optional_roles_are_left_out_and_other_roles_required() -> None:
    assert Scoring("actor", "second").dataflow.call("compare").needs == ("scores", "more_scores")
    alone = Scoring("actor").dataflow
    assert [call.name for call in alone.calls] == ["actor.infer", "compare", "actor.train"]
    assert (alone.call("compare").needs, alone.call("compare").whole_batch) == (("scores",), True)
    with pytest.raises(PlanError, match=r"call 'actor\.infer' is of role 'actor', which roles\(\) does not return; it"):
        _ = Scoring("second").dataflow


class Choosy(Scoring):
    """An algorithm with two calls that produce the same scores."""

    @infer("second", needs="batch", produces="scores")
    def score_again(self) -> None:
        """Score with the second role."""

    @compute(needs="scores", produces="targets", whole_batch=True)
    def compare(self) -> None:
        """Compare the scores of either role."""

    def calls(self) -> tuple[ModelFunctionCall, ...]:
        """Leave out the actor's call if there is a second role."""
        return tuple(call for call in super().calls() if call.name != "actor.infer" or "second" not in self.names)


def test_a_role_that_ignores_its_adapters_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"gives actor adapters, and its Role has peft=None; write Role\("):
        Scoring("actor", peft_config=LORA).configure_model()
    with pytest.raises(ConfigError, match=r"gives second adapters, .*, or name only roles that have adapters"):
        Scoring("actor", "second", peft_config={"second": "folder"}).configure_model()


def test_named_frozen_roles_merge_saved_adapters() -> None:
    actor, reference = runs.grpo(peft_config={"actor": LORA, "reference": "one"}).roles()
    assert (actor.peft, reference.peft, reference.shares) == (LORA, "one", None)
    named = {"actor": LORA, "teacher": "two"}
    assert [role.peft for role in OnPolicyDistillation("x", "y", peft_config=named).roles()] == [LORA, "two"]
    with pytest.raises(ConfigError, match="peft_config names reference, and the roles are actor, teacher"):
        OnPolicyDistillation("x", "y", peft_config={"reference": "one"})


def test_settings_choose_between_two_producers_of_one_column() -> None:
    for names, producer in ((("actor",), "actor.infer"), (("actor", "second"), "second.infer")):
        flow = Choosy(*names).dataflow
        assert [call.name for call in flow.calls] == [producer, "compare", "actor.train"]
        assert flow.call("compare").needs == ("scores",)


def test_an_algorithm_that_trains_nothing_has_no_optimizer() -> None:
    module = Judge()
    module.configure_model()
    assert module.configure_optimizers() is None


def test_validation_without_evaluation_calls_is_refused() -> None:
    module: Any = Judge()
    with pytest.raises(ConfigError, match="Judge declares no evaluation_calls; leave the validation data out"):
        module.validation_step(next(iter(runs.Batches(1))), 0)


def test_reward_functions_see_the_fraction_of_an_epoch_only_while_fitting() -> None:
    module: Any = Judge()
    module.trainer = trainer = L.Trainer(max_epochs=2, accelerator="cpu", barebones=True)
    trainer.fit_loop.max_batches = 4
    trainer.fit_loop.epoch_loop.batch_progress.current.completed = 2
    trainer.fit_loop.epoch_progress.current.completed = 1
    trainer.state.fn = TrainerFn.FITTING
    assert module.trainer_state().epoch == 1.5  # one epoch, and 2 of 4 batches
    # As after fit: two epochs are counted, and the second one's batches are still there.
    trainer.fit_loop.epoch_loop.batch_progress.current.completed = 4
    trainer.fit_loop.epoch_progress.current.completed = 2
    for function in (TrainerFn.VALIDATING, TrainerFn.TESTING):
        trainer.state.fn = function
        assert module.trainer_state().epoch == 2.0
