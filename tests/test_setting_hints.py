"""Hints for unknown settings: a typo or another library's name is answered with our setting.

A hint never hides a setting that exists.
"""

import ast
import copy
import dataclasses
import inspect
import pickle
import re
from collections.abc import Mapping
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger

import lightning_realloc.rewards
from lightning_realloc import (
    DPO,
    GAE,
    GRPO,
    KL,
    PPO,
    RLOO,
    SFT,
    AutoTuner,
    Clip,
    ConfigError,
    Conversation,
    Correction,
    GenerationEngine,
    GenerationOptions,
    MultiModelModule,
    ReallocStrategy,
    Role,
    RolloutBudget,
    SamplingParams,
    Speculation,
    TrainOptions,
)
from lightning_realloc.algorithms.losses.policy_losses import POLICY_LOSSES, Cispo
from lightning_realloc.data.demonstrations import SFTDataModule
from lightning_realloc.data.preferences import PreferenceDataModule
from lightning_realloc.data.prompts import PromptDataModule
from lightning_realloc.dataflow.execution_plan import CallPlan
from lightning_realloc.setting_hints import (
    ALGORITHM_HINTS,
    ENGINE_HINTS,
    GAE_HINTS,
    GENERATION_HINTS,
    KL_HINTS,
    POLICY_LOSS_HINTS,
    POLICY_LOSS_NAMES,
    ROLE_HINTS,
    SAMPLING_HINTS,
    SPECULATION_HINTS,
    STRATEGY_HINTS,
    TRAIN_OPTIONS_HINTS,
    VERL_HINTS,
    algorithm_topics,
    settings_of,
)
from tests.every_algorithm import ALGORITHMS

DATA_MODULES = (PromptDataModule, PreferenceDataModule, SFTDataModule)


def no_reward(completions: list[str], **columns: Any) -> list[float]:
    """Return zero for every completion."""
    return [0.0 for _ in completions]


@pytest.mark.parametrize(
    ("make", "hint"),
    [
        (lambda: GRPO("x", no_reward, num_generations=8), "SamplingParams(n=...)"),
        (lambda: GRPO(model="x", reward_funcs=no_reward), "reward_funcs: here it is reward="),
        (lambda: GRPO("x", no_reward, beta=0.04), "kl_coef="),
        (lambda: PPO("x", no_reward, cliprange=0.2), "policy_loss=Clip(low=..., high=...)"),
        (lambda: GRPO("x", no_reward, use_vllm=True), "the package also generates by itself"),
        (
            lambda: GRPO("x", no_reward, vllm_tensor_parallel_size=2),
            "the layout of actor.generate in the plan, such as dp2.tp2",
        ),
        (lambda: GRPO("x", no_reward, vllm_gpu_memory_utilization=0.5), "VLLMOptions(memory_share=...)"),
        (lambda: GRPO("x", no_reward, vllm_max_model_length=512), "VLLMOptions(max_length=...)"),
        (lambda: GRPO("x", no_reward, max_tool_calling_iterations=3), "Conversation(max_turns=...), one more"),
        (lambda: GRPO("x", no_reward, auto_find_batch_size=True), "halves its micro-batches"),
        (lambda: DPO("x", precompute_ref_log_probs=True), "precompute_reference="),
        (lambda: SFT("x", assistant_only_loss=True), "the data module's learn"),
        (lambda: SFTDataModule([], batch_size=1, packing=True), "samples are always packed"),
        (lambda: DPO("x", ref_model="y"), "reference="),
        (lambda: DPO("x", loss_type="ipo"), "loss="),
        (lambda: SFT("x", max_length=512), "max_tokens"),
        (lambda: SamplingParams(max_tokens=5), "max_new_tokens="),
        (lambda: TrainOptions(gradient_accumulation_steps=2), "micro_batch_tokens="),
        (lambda: SFTDataModule([], batch_size=1, eval_dataset=[]), "val_data="),
        (lambda: PromptDataModule([], batch_size=1, max_prompt_length=9), "max_prompt_tokens="),
        (lambda: PromptDataModule([], batch_size=1, dataloader_drop_last=True), "drop_last="),
        (lambda: GRPO("x", no_reward, logging_strategy="steps"), "Trainer(log_every_n_steps=...)"),
        (lambda: GRPO("x", no_reward, label_smoothing=0.1), "label_smoothing= of DPO"),
        (lambda: DPO("x", adam_beta2=0.95), "optimizer=partial(torch.optim.AdamW"),
        (lambda: PPO("x", no_reward, normalize_reward=True), "not available: GRPO compares within groups"),
        (lambda: PPO("x", no_reward, adv_estimator="gae"), "the algorithm: PPO for 'gae'"),
        (lambda: GRPO("x", no_reward, actor_num_gpus_per_node=4), "ranks of actor.train in the plan"),
        (lambda: GRPO("x", no_reward, ppo_mini_batch_size=8), "TrainOptions(num_minibatches=...)"),
        (lambda: GRPO("x", no_reward, lr=1e-6), "here it is learning_rate="),
        (lambda: GRPO("x", no_reward, tensor_model_parallel_size=2), "the layout of actor.generate in the plan"),
        (lambda: GRPO("x", no_reward, rollout_n=8), "here it is sampling=SamplingParams(n=...)"),
        (lambda: GRPO("x", no_reward, **{"rollout.n": 8}), "here it is sampling=SamplingParams(n=...)"),
        (lambda: PPO("x", no_reward, critic_optim_lr=1e-5), "here it is critic_learning_rate= of PPO"),
        (lambda: GRPO("x", no_reward, batch_size=8), "the data module's batch_size"),
        (lambda: GRPO("x", no_reward, devices=8), "here it is Lightning's Trainer(devices=...)"),
    ],
)
def test_a_name_of_another_library_is_answered_with_our_setting(make: Any, hint: str) -> None:
    with pytest.raises(ConfigError) as refused:
        make()
    assert hint in str(refused.value)


def test_a_name_that_is_also_our_setting_is_accepted() -> None:
    DPO("x", beta=0.3)  # which GRPO calls kl_coef
    assert SamplingParams(temperature=0.5).temperature == 0.5


@pytest.mark.parametrize(
    ("make", "answer"),
    [
        (lambda: SFT("x", learning_rte=1.0), "SFT has no setting learning_rte; did you mean learning_rate=?"),
        (lambda: PPO(value_clp=0.2), "PPO has no setting value_clp; did you mean value_clip=?"),
        (lambda: DPO("x", correction="none"), "DPO has no setting correction; it is a setting of GRPO, PPO, "),
        (lambda: PPO(free_cache=False), "here it is generation=GenerationOptions(free_cache=...)"),
        (lambda: SFT("x", num_minibatches=2), "here it is train_options=TrainOptions(num_minibatches=...)"),
        (lambda: SamplingParams(temprature=0.2), "did you mean temperature=?"),
        (lambda: Speculation(draftr="ngram"), "did you mean drafter=?"),
        (lambda: Speculation(num_speculative_tokens=4), "here it is num_draft_tokens="),
        (lambda: KL(beta=0.1), "KL has no setting beta; here it is coef="),
        (lambda: GAE(lam=0.9), "GAE has no setting lam; here it is gae_lambda="),
        (lambda: PPO("x", no_reward, gae_lambda=0.9), "here it is advantages=GAE(gae_lambda=...) of PPO"),
        (lambda: GRPO("x", no_reward, normalize_by_std=False), "here it is advantages='group_mean' for False"),
        (lambda: RLOO("x", no_reward, kl_place="loss"), "here it is kl=KL(place=...)"),
        (lambda: Clip(epsilon=0.1), "Clip has no setting epsilon; here it is high=, and low= of Clip"),
        (lambda: Cispo(epsilon=5), "Cispo has no setting epsilon; here it is high=, and low= of Clip"),
        (lambda: SFT("x", clip_low=0.1), "here it is policy_loss=Clip(low=...); SFT has no policy_loss="),
        (lambda: SFT("x", rollout_budget=None), "(rollout_budget=...) of the policy algorithms alone"),
        (lambda: GRPO("x", no_reward, loss_type="dapo"), "here it is policy_loss=, loss_average= and ratio_level="),
        (lambda: DPO("x", kl_coef=0.1), "here it is kl_coef= of the policy algorithms, beta= of DPO"),
        (lambda: Clip(loss_average="token"), "here it is a setting of the algorithm, next to policy_loss="),
        (lambda: GRPO("x", no_reward, clip_high=0.3), "here it is policy_loss=Clip(high=...) or Cispo(high=...)"),
        (lambda: GRPO("x", no_reward, loss="cispo"), "here it is policy_loss=, a name or a value such as Cispo("),
        (lambda: GRPO("x", no_reward, max_cache_bytes=9), "generation=GenerationOptions(max_cache_bytes=...)"),
        (lambda: PPO("x", no_reward, rollout_budget=None), "generation=GenerationOptions(rollout_budget=...)"),
        (lambda: SFT("x", sample_reallocation=True), "generation=GenerationOptions(sample_reallocation=...)"),
        (lambda: GenerationOptions(engine="hf"), "here it is a setting of the algorithm, next to generation="),
        (lambda: GenerationOptions(speculation=None), "here it is a setting of the algorithm, next to generation="),
        (lambda: GenerationOptions(max_cash_bytes=1), "did you mean max_cache_bytes=?"),
        (lambda: GenerationOptions(gpu_memory_utilization=0.9), "here it is max_cache_bytes="),
        (lambda: Conversation(turns=4), "did you mean max_turns=?"),
        (lambda: RolloutBudget(token=4), "did you mean tokens=?"),
        (lambda: SFT("m", zzz=4), "SFT has no setting zzz; help(SFT) describes the "),
        (lambda: GRPO("m", no_reward, zzz=4), "GRPO has no setting zzz; help(PolicyGradient) describes the "),
        (lambda: Clip(clip_ratio_c=3), "Clip has no setting clip_ratio_c; here it is most="),
        (lambda: Correction(zzz=4), "Correction has no setting zzz; it has "),
        (lambda: GenerationEngine(None, max_num_seqs=4), "here it is max_slots="),
        (lambda: ReallocStrategy(overlp="none"), "did you mean overlap=?"),
        (lambda: ReallocStrategy(generation_parts=2), "here it is generation_chunks="),
        (lambda: ReallocStrategy(start_method="spawn"), "here it is launcher="),
        (lambda: Role(name="reference", follows="actor"), "here it is average_of="),
        (lambda: ReallocStrategy(devices=2), "here it is Lightning's Trainer(devices=...)"),
        (lambda: AutoTuner(max_trial=2), "did you mean max_trials=?"),
        (lambda: PromptDataModule([], batch_sise=2), "did you mean batch_size=?"),
    ],
)
def test_a_misspelt_name_is_answered_with_the_most_similar_setting(make: Any, answer: str) -> None:
    with pytest.raises(ConfigError) as refused:
        make()
    assert answer in str(refused.value)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_settings_of_an_algorithm_include_those_of_its_base_classes(algorithm: type) -> None:
    assert {"learning_rate", "train_options", "peft_config", "seed", "tokenizer"} <= settings_of(algorithm)


def named_in(hints: Mapping[str, str]) -> set[str]:
    """Return the settings at the beginning of hints."""
    settings = {hint.partition("=")[0] for hint in hints.values()}
    return {setting for setting in settings if " " not in setting}


def test_every_hint_of_options_names_a_field() -> None:
    classes = ((SAMPLING_HINTS, SamplingParams), (TRAIN_OPTIONS_HINTS, TrainOptions), (SPECULATION_HINTS, Speculation))
    classes += (
        (KL_HINTS, KL),
        (GAE_HINTS, GAE),
        (GENERATION_HINTS, GenerationOptions),
        (ENGINE_HINTS, GenerationEngine),
    )
    classes += ((STRATEGY_HINTS, ReallocStrategy), (ROLE_HINTS, Role))
    for hints, cls in classes:
        assert named_in(hints) <= settings_of(cls)
    assert named_in(POLICY_LOSS_HINTS) <= set().union(*map(settings_of, (*POLICY_LOSSES.values(), GRPO)))
    known = set().union(*map(settings_of, ALGORITHMS))
    named = {
        hint.partition("=")[0] for hint in ALGORITHM_HINTS.values() if "=" in hint and " " not in hint.split("=")[0]
    }
    assert {name for name in named if "(" not in name} <= known


def test_every_name_in_a_hint_of_the_algorithms_exists() -> None:
    of_algorithms = set().union(*map(settings_of, ALGORITHMS))
    of_data = {"data"}.union(*map(settings_of, DATA_MODULES))
    for hint in [*ALGORITHM_HINTS.values(), *VERL_HINTS.values(), *POLICY_LOSS_NAMES.values()]:
        for call in re.findall(CALL, hint):
            for node in ast.walk(ast.parse(call, mode="eval")):
                if isinstance(node, ast.Call) and not is_checked_by_hand(node):
                    taken = inspect.signature(class_named(ast.unparse(node.func))).parameters
                    assert {str(keyword.arg) for keyword in node.keywords} <= taken.keys(), hint
        assert set(re.findall(r"(\w+)=", re.sub(CALL, "", hint))) <= of_algorithms, hint
        assert set(re.findall(r"data module's (\w+)", hint)) <= of_data, hint
        options = re.findall(r"(\w+)(?:: true)? of the \w+ call in the plan", hint)
        assert set(options) <= {field.name for field in dataclasses.fields(CallPlan)} | {"layout"}, hint


def test_a_name_in_several_topics_has_one_hint() -> None:
    topics = algorithm_topics().values()
    different = [name for topic in topics for name, hint in topic.items() if ALGORITHM_HINTS[name] != hint]
    assert different == []


CALL = r"\b[\w.]+\((?:[^()]|\([^()]*\))*\)"


def is_checked_by_hand(call: ast.Call) -> bool:
    """Return whether a call is of a function or method, such as ``partial``, which takes another one's arguments."""
    return ast.unparse(call.func).rpartition(".")[2][0].islower()


def class_named(name: str) -> Any:
    """Return the class that a hint names, ours or Lightning's."""
    of_lightning = {"Trainer": L.Trainer, "ModelCheckpoint": ModelCheckpoint, "WandbLogger": WandbLogger}
    of_lightning["TensorBoardLogger"] = TensorBoardLogger
    ours = lightning_realloc if hasattr(lightning_realloc, name) else lightning_realloc.rewards
    return of_lightning[name] if name in of_lightning else getattr(ours, name)


def test_a_users_subclass_may_take_a_setting_that_has_a_hint() -> None:
    class Mine(SFT):
        def __init__(self, *args: Any, **settings: Any) -> None:
            self.max_length = settings.pop("max_length")
            super().__init__(*args, **settings)

    assert Mine("x", max_length=7).max_length == 7


class FromScratch(MultiModelModule):
    """An algorithm as in docs/own-algorithm.md."""

    def __init__(self, actor: str, **settings: Any) -> None:
        super().__init__(**settings)


class OwnGRPO(GRPO):
    """An algorithm with a constructor that passes settings on."""

    def __init__(self, actor: str, **settings: Any) -> None:
        super().__init__(actor, no_reward, **settings)


class OwnData(PromptDataModule):
    """A data module with a constructor that passes settings on."""

    def __init__(self, **settings: Any) -> None:
        super().__init__([], batch_size=1, **settings)


@pytest.mark.parametrize(
    ("make", "answer"),
    [
        (lambda: FromScratch("x", max_cache_bytes=5), "FromScratch has no setting max_cache_bytes; here it is gen"),
        (lambda: FromScratch("x", lr=0.1), "FromScratch has no setting lr; here it is learning_rate="),
        (lambda: OwnGRPO("x", num_generations=8), "OwnGRPO has no setting num_generations; here it is sampling="),
        (lambda: OwnGRPO("x", clip_high=0.3, zzz=1), "clip_high: here it is policy_loss=Clip(high=...)"),
        (lambda: OwnGRPO("x", smpling=None), "OwnGRPO has no setting smpling; did you mean sampling=?"),
        (lambda: OwnData(eval_dataset=[]), "OwnData has no setting eval_dataset; here it is val_data="),
    ],
)
def test_settings_that_a_users_subclass_passes_on_are_checked(make: Any, answer: str) -> None:
    with pytest.raises(ConfigError) as refused:
        make()
    assert answer in str(refused.value)


def test_options_with_hints_can_be_copied_and_pickled() -> None:
    given = SamplingParams(n=3, stop_strings=("a",))
    assert copy.deepcopy(given) == given == pickle.loads(pickle.dumps(given))
    assert not hasattr(given, "__dict__")


def test_settings_that_are_left_out_and_have_no_default_are_named() -> None:
    with pytest.raises(ConfigError, match=r"needs batch_size, .*; write PromptDataModule\(batch_size="):
        PromptDataModule()
    with pytest.raises(ConfigError, match=r"^DPO needs actor, .*; write DPO\(actor\)"):
        DPO(beta=0.1)
    with pytest.raises(ConfigError, match=r"^Role needs source and trained, "):
        Role("actor")

    class Own(PromptDataModule):
        def __init__(self) -> None:
            super().__init__(batch_size=4)

    assert copy.deepcopy(Own()).batch_size == 4
