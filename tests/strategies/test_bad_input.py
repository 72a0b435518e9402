"""Invalid input is refused on every rank before any training step, with the rule, the values and the way out."""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder, ModelCheckpoint
from lightning.pytorch.tuner import Tuner
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, TrainerCallback

from lightning_realloc.algorithms.grpo import GRPO
from lightning_realloc.algorithms.kto import KTO
from lightning_realloc.algorithms.reward_model import RewardModel
from lightning_realloc.algorithms.sft import SFT
from lightning_realloc.batch.packing import PackedBatch
from lightning_realloc.batch.ragged import Ragged
from lightning_realloc.batch.samples import Samples
from lightning_realloc.callbacks import SaveHuggingFace
from lightning_realloc.data.demonstrations import SFTDataModule
from lightning_realloc.data.preferences import PreferenceDataModule
from lightning_realloc.errors import ConfigError, PlanError, ReallocError, RewardError
from lightning_realloc.generation import GenerationEngine, SamplingParams
from lightning_realloc.strategies import ReallocStrategy
from lightning_realloc.strategies.lightning.trainer_checks import refuse_gradient_settings
from tests.environments.guessing import Guessing, chat_model, chat_tokenizer, is_even
from tests.matrices import few_and_more
from tests.models import SIZES, byte_tokenizer, tiny_model, tiny_scorer
from tests.strategies import runs
from tests.strategies.calls.test_agents import Games
from tests.strategies.runs import Batches, calls
from tests.workers import WorkerPool

WORLD_SIZE = 2


def refusal(make: Callable[[], Any]) -> str:
    """Return the error of a run of ``make``, and the iterations before it."""
    record = runs.Record()
    try:
        make_and_fit(make, record)
    except (ReallocError, MisconfigurationException) as error:
        return f"{len(record.steps)} {type(error).__name__}: {error}"
    return f"{len(record.steps)} not refused"


def make_and_fit(make: Callable[[], Any], record: runs.Record) -> None:
    """Fit with the module, strategy or plan, and batches that ``make`` returns."""
    module, strategy, batches = make()
    if not isinstance(strategy, ReallocStrategy):
        strategy = ReallocStrategy(strategy)
    runs.trainer(strategy, WORLD_SIZE, callbacks=[record]).fit(module, batches)


def refusals(cases: Sequence[Callable[[], Any]]) -> list[str]:
    """Return the error of each case on this rank."""
    return [refusal(case) for case in cases]


def expect(workers: WorkerPool, expected: dict[Callable[[], Any], str]) -> None:
    """Run all cases on two ranks, and require that both refuse each with its text before any step."""
    everyone = workers.run(refusals, list(expected), world_size=WORLD_SIZE, init_process_group=False, deadline_s=120.0)
    for rank, texts in enumerate(everyone):
        for (case, text), found in zip(expected.items(), texts, strict=True):
            assert found.startswith("0 "), f"{case.__name__} on rank {rank}: {found}"
            assert text in found, f"{case.__name__} on rank {rank}: {found}"


# ---- strategy


def test_an_unknown_launcher_is_refused_at_construction() -> None:
    with pytest.raises(ConfigError, match="launcher='thread' must be one of popen, spawn, fork, ray"):
        ReallocStrategy(launcher="thread")  # type: ignore[arg-type]


# ---- plans


def unknown_layout() -> Any:
    """A layout string that names no axis."""
    return runs.sft(), calls(actor_train="zero3"), Batches(1, responses=True)


def degrees_that_do_not_multiply() -> Any:
    """Two times two on three ranks."""
    return runs.sft(), calls(actor_train="fsdp2.tp2@0-2"), Batches(1, responses=True)


def more_ranks_than_heads() -> Any:
    """One head over two ranks."""
    model = tiny_model("llama", num_attention_heads=1, num_key_value_heads=1)
    return runs.sft(actor=model), calls(actor_train="tp2"), Batches(1, responses=True)


def too_many_ranks() -> Any:
    """Four ranks, two devices."""
    return runs.sft(), calls(actor_train="fsdp4"), Batches(1, responses=True)


def plan_for_another_world() -> Any:
    """A plan for one rank."""
    return runs.sft(), calls(actor_train="fsdp1"), Batches(1, responses=True)


def call_without_layout() -> Any:
    """No layout for the reference."""
    return runs.grpo(), calls(actor_train="fsdp2", actor_generate="dp2"), Batches(1)


def unknown_call() -> Any:
    """A layout for a critic that does not exist."""
    return runs.sft(), calls(actor_train="fsdp2", critic_train="fsdp2"), Batches(1, responses=True)


def unknown_option() -> Any:
    """A misspelt option."""
    return runs.sft(), {"calls": {"actor.train": {"layout": "fsdp2", "microbatch": 4}}}, Batches(1, responses=True)


def offload_without_a_gpu() -> Any:
    """Activations that would leave a device for the memory in which they are."""
    plan = calls(actor_train={"layout": "fsdp2", "activation_offload": True})
    return runs.sft(), plan, Batches(1, responses=True)


def compiled_zero_bubble() -> Any:
    """A compiler and a schedule that both change the backward pass of a layer."""
    plan = calls(actor_train={"layout": "pp2", "pipeline_schedule": "zero_bubble"})
    return runs.sft(train_options=runs.options(compile="eager")), plan, Batches(1, responses=True)


def missing_plan_file() -> Any:
    """A path that does not exist."""
    return runs.sft(), "no/such/plan.yaml", Batches(1, responses=True)


def no_tensor_parallel_plan() -> Any:
    """A model that transformers cannot shard."""
    return runs.sft(actor=tiny_model("gpt2")), calls(actor_train="tp2"), Batches(1, responses=True)


def style_that_leaves_out_gradients() -> Any:
    """A learned activation between cut layers, as one that reads all features."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("apertus", **SIZES)).float()
    plan = {"actor": {"model.layers.*.mlp.act_fn": "replicate"}}
    strategy = ReallocStrategy(calls(actor_train="tp2", actor_infer="tp2"), tp_plans=plan)
    return runs.sft(actor=model), strategy, Batches(1, responses=True)


class WithoutModel(SFT):
    """An algorithm that does not build its model."""

    def configure_model(self) -> None:
        """Build nothing."""


def role_without_model() -> Any:
    """A call whose role was never built."""
    return WithoutModel(tiny_model("llama")), "heuristic", Batches(1, responses=True)


class NeverBuilt(GRPO):
    """An algorithm whose models must not be built."""

    def configure_model(self) -> None:
        """Fail."""
        raise AssertionError("models are built")


def stages_of_another_engine() -> Any:
    """An engine that runs whole models, in two stages."""
    module = NeverBuilt(
        tiny_model("llama"), runs.low_tokens, sampling=runs.SAMPLING, tokenizer=byte_tokenizer(), engine="hf"
    )
    return module, calls(actor_generate="pp2", actor_train="fsdp2"), Batches(1)


def recurrent_model() -> Any:
    """A model whose state crosses the sequences of a pack."""
    config = AutoConfig.for_model("mamba", vocab_size=128, num_hidden_layers=2, hidden_size=8, state_size=2)
    module = NeverBuilt(config, runs.low_tokens, sampling=runs.SAMPLING, tokenizer=byte_tokenizer(), engine="hf")
    return module, calls(actor_generate="dp2", actor_train="cp2"), Batches(1)


def test_invalid_plans_are_refused(workers: WorkerPool) -> None:
    expect(
        workers,
        {
            unknown_layout: "PlanError: calls.actor.train: ",
            degrees_that_do_not_multiply: "PlanError: calls.actor.train: ",
            more_ranks_than_heads: "LayoutError: ",
            too_many_ranks: "layout fsdp4@0-3 uses rank 2, but this run has 2 ranks (0-1); use 4 devices",
            plan_for_another_world: "PlanError: the plan leaves rank 1 without any call, and this run has 2 ranks",
            call_without_layout: "PlanError: the plan gives no layout for reference.infer; add a line",
            unknown_call: "names critic.train, which this algorithm does not have; it has actor.infer, actor.train",
            unknown_option: "calls.actor.train has no option 'microbatch'; it has activation_offload",
            offload_without_a_gpu: "PlanError: calls.actor.train: activation_offload moves activations from a CUDA",
            stages_of_another_engine: "GenerationError: actor.generate runs in the layout pp2@0-1, whose ranks hold a",
            recurrent_model: "ConfigError: MambaForCausalLM cannot run packed sequences: its layers ['linear_att",
            compiled_zero_bubble: "PlanError: calls.actor.train: pipeline_schedule='zero_bubble' divides the backward",
            missing_plan_file: "PlanError: plan file no/such/plan.yaml: ",
            no_tensor_parallel_plan: "LayoutError: ",
            style_that_leaves_out_gradients: "LayoutError: actor: the gradient of model.layers.0.mlp.act_fn.alpha_",
            different_plans: "PlanError: ranks hold different execution plans; give every process the same file",
            role_without_model: "PlanError: role 'actor' has no model; configure_model() built none",
        },
    )


def different_plans() -> Any:
    """A different plan on each rank; the second rank's plan is invalid."""
    layout = "fsdp2" if os.environ["LOCAL_RANK"] == "0" else "fsdp4"
    return runs.sft(), calls(actor_train=layout), Batches(1, responses=True)


# ---- inputs and outputs of calls


def shouting(prompts: Sequence[object], **columns: object) -> list[float]:
    """A reward function that fails on one prompt."""
    if "prompt 3" in prompts:
        raise ValueError("no digits allowed")
    return [0.0] * len(prompts)


def forgetful(prompts: Sequence[object], **columns: object) -> list[float]:
    """A reward function that returns one reward too few, on one rank only."""
    return [0.0] * (len(prompts) - ("prompt 3" in prompts))


def undefined(prompts: Sequence[object], **columns: object) -> list[float]:
    """A reward function that divides zero by zero for one prompt."""
    return [float("nan") if prompt == "prompt 3" else 0.0 for prompt in prompts]


def raising_reward() -> Any:
    """A reward function that fails on one rank, which has prompt 3."""
    return runs.grpo(reward=shouting), "heuristic", Batches(1)


def wrong_number_of_rewards() -> Any:
    """One reward too few, on one rank."""
    return runs.grpo(reward=forgetful), "heuristic", Batches(1)


def undefined_reward() -> Any:
    """NaN, on one rank."""
    return runs.grpo(reward=undefined), "heuristic", Batches(1)


class LongPrompt(Batches):
    """Six prompts; the last one is longer than the model's context."""

    def __iter__(self) -> Any:
        for samples in super().__iter__():
            rows = [*samples.ragged("prompt_ids").split()[:-1], torch.full((200,), 5)]
            yield samples.with_columns(prompt_ids=Ragged.from_list(rows))


def long_prompt() -> Any:
    """A prompt that only one rank generates from."""
    return runs.grpo(), "heuristic", LongPrompt(1)


class StrangePrompt(Batches):
    """Six prompts; the last one has a token outside the model's vocabulary."""

    def __iter__(self) -> Any:
        for samples in super().__iter__():
            rows = [*samples.ragged("prompt_ids").split()[:-1], torch.full((20,), 1000)]
            yield samples.with_columns(prompt_ids=Ragged.from_list(rows))


def strange_prompt() -> Any:
    """An error of the engine on one rank."""
    return runs.grpo(), "heuristic", StrangePrompt(1)


def strange_prompt_in_lockstep() -> Any:
    """The same error while the other rank waits for this rank's steps."""
    return runs.grpo(), "static", StrangePrompt(1)


def model_that_cannot_be_generated_from() -> Any:
    """An error of the engine on the only rank that generates."""
    twice = AutoModelForCausalLM.from_config(AutoConfig.for_model("diffllama", **SIZES))
    module = GRPO(twice, runs.low_tokens, sampling=runs.SAMPLING, tokenizer=byte_tokenizer(), kl_coef=0.0)
    return module, calls(actor_generate="dp1@0", actor_train="dp2"), Batches(1)


def model_that_cannot_be_trained_on_packs() -> Any:
    """A model that no engine makes trainable."""
    sizes = {"vocab_size": 128, "n_layer": 1, "hidden_size": 16, "n_head": 2}
    bloom = AutoModelForCausalLM.from_config(AutoConfig.for_model("bloom", **sizes))
    module = GRPO(bloom, runs.low_tokens, sampling=runs.SAMPLING, tokenizer=byte_tokenizer(), kl_coef=0.0, engine="hf")
    return module, calls(actor_generate="dp2", actor_train="dp2"), Batches(1)


def model_that_loses_the_segments_of_packs() -> Any:
    """A model whose blocks pass no keyword arguments on, which no rollout shows."""
    nemotron = AutoModelForCausalLM.from_config(AutoConfig.for_model("nemotron", **SIZES))
    module = GRPO(nemotron, no_rewards, sampling=runs.SAMPLING, tokenizer=byte_tokenizer(), kl_coef=0.0, engine="hf")
    return module, calls(actor_generate="dp2", actor_train="dp2"), Batches(1)


def no_rewards(**columns: object) -> list[float]:
    """Raise, because no rollout should get this far."""
    raise AssertionError("the rollout ran")


class NotFinite(runs.RecordedGRPO):
    """An algorithm whose inference fails on the rank that has sample 3."""

    def score_reference(self, reference: nn.Module, batch: PackedBatch) -> torch.Tensor:
        """Fail on one rank."""
        if 3 in batch.ids.tolist():
            raise ArithmeticError("overflow")
        return super().score_reference(reference, batch)


def failing_inference() -> Any:
    """An error of the user's code, on one rank."""
    module = NotFinite(
        tiny_model("llama"), runs.low_tokens, sampling=runs.SAMPLING, tokenizer=byte_tokenizer(), kl_coef=0.1
    )
    return module, "heuristic", Batches(1)


class AfterwardsFailing(runs.RecordedGRPO):
    """An algorithm that fails on one rank after generating in lockstep with the others."""

    def roll_out(self, actor: GenerationEngine, prompts: Samples) -> Samples:
        """Generate, then fail on the rank with prompt 3."""
        made = super().roll_out(actor, prompts)
        if 3 in prompts.ids.tolist():
            raise PlanError("too late")
        return made


def failing_after_lockstep() -> Any:
    """An error while the other rank no longer waits for a step."""
    module = AfterwardsFailing(
        tiny_model("llama"), runs.low_tokens, sampling=runs.SAMPLING, tokenizer=byte_tokenizer(), kl_coef=0.0
    )
    return module, "static", Batches(1)


def reward_with_another_vocabulary() -> Any:
    """A reward model with another vocabulary than the actor's."""
    return runs.ppo(reward=tiny_scorer("llama", vocab_size=64)), "static", Batches(1)


def limit_of_nothing() -> Any:
    """A limit on a metric that no loss reports."""
    return runs.ppo(train_options=runs.options(stop_above={"surprise": 1.0})), "static", Batches(1)


class TensorLoss(SFT):
    """An algorithm whose training call returns the loss alone."""

    def actor_loss(self, *args: Any) -> Any:
        """Return a tensor."""
        return super().actor_loss(*args).value


def loss_without_metrics() -> Any:
    """A training call that returns another type."""
    return TensorLoss(tiny_model("llama")), "heuristic", Batches(1, responses=True)


def nothing_to_learn() -> Any:
    """Responses without a token."""
    return runs.sft(), "heuristic", Batches(1, responses=True, silent=6)


def no_samples_for_mini_batches() -> Any:
    """More mini-batches than samples."""
    return runs.sft(train_options=runs.options(num_minibatches=9)), "heuristic", Batches(1, responses=True)


def sequence_longer_than_a_micro_batch() -> Any:
    """A pack must hold the longest sequence."""
    return runs.sft(train_options=runs.options(micro_batch_tokens=4)), "heuristic", Batches(1, responses=True)


FAILURES = {
    raising_reward: "RewardError: reward function 'shouting' raised ValueError in test_bad_input.py, line",
    long_prompt: "GenerationError: the prompt of sample 5 has 200 tokens, and actor's context of 128 leaves no",
    model_that_cannot_be_generated_from: "GenerationError: DiffLlamaAttention attends with the same layer twi",
    model_that_cannot_be_trained_on_packs: "ConfigError: BloomForCausalLM cannot run packed sequences: its at",
    strange_prompt: "holds token ids from 1000 to 1000, the model's vocabulary has 128",
    failing_after_lockstep: "PlanError: too late",
    loss_without_metrics: "@train method must return a Loss; actor_loss of actor returned a Tensor: write",
    sequence_longer_than_a_micro_batch: "DataError: a sequence must fit one micro-batch",
}
MORE_FAILURES = {
    wrong_number_of_rewards: "RewardError: reward function 'forgetful' must return one number per completion",
    undefined_reward: "RewardError: reward function 'undefined' must return finite numbers (of at most",
    model_that_loses_the_segments_of_packs: "ConfigError: NemotronAttention got packed sequences without",
    strange_prompt_in_lockstep: "holds token ids from 1000 to 1000, the model's vocabulary has 128",
    reward_with_another_vocabulary: "ConfigError: reward has another vocabulary than the actor: 64 tokens, the",
    limit_of_nothing: "ConfigError: stop_above names 'surprise', which this loss does not measure; it measures",
    nothing_to_learn: "DataError: a mini-batch needs at least one response token; its 6 sequences have none",
    no_samples_for_mini_batches: "ConfigError: num_minibatches=9 needs as many samples in an iteration",
}


@few_and_more([*FAILURES.items()], [*MORE_FAILURES.items()])
def test_a_failure_on_one_rank_is_raised_on_all(
    workers: WorkerPool, cases: list[tuple[Callable[[], Any], str]]
) -> None:
    expect(workers, dict(cases))


# ---- environments


class Numbers(Guessing):
    """Begins with numbers, which are no messages."""

    def reset(self, row: Any) -> Any:
        """Return numbers."""
        return [1, 2]


class Words(Guessing):
    """Answers with a word, which is no result."""

    def step(self, message: Any) -> Any:
        """Return a word."""
        return "higher"


def game(**settings: Any) -> Any:
    """GRPO with an environment of messages."""
    return runs.RecordedGRPO(
        chat_model(), runs.low_tokens, reference=chat_model(1), tokenizer=chat_tokenizer(),
        sampling=SamplingParams(n=2, max_new_tokens=24), **settings,
    )  # fmt: skip


def rows_without_their_environment() -> Any:
    """Two environments, and no column that selects one."""
    return game(environment={"a": Guessing, "b": Guessing}), "heuristic", Games()


def reset_of_numbers() -> Any:
    """A conversation must begin with messages, on the rank that asks for all, too."""
    return game(environment=Numbers), calls(actor_generate="tp2", reference_infer="dp2", actor_train="dp2"), Games()


def step_of_a_word() -> Any:
    """A step must return a StepResult."""
    return game(environment=Words), "heuristic", Games()


def parser_of_another_family() -> Any:
    """The template must show calls as the parser reads them."""
    return game(tools=[is_even], parser="hermes"), "heuristic", Games()


def test_environments_that_cannot_be_played_are_refused_on_all_ranks(workers: WorkerPool) -> None:
    expect(
        workers,
        {
            rows_without_their_environment: "ConfigError: with several environments, the column 'environment' of every",
            reset_of_numbers: "ConfigError: Numbers.reset must return messages with 'role' and 'content', or None",
            step_of_a_word: "ConfigError: Words.step must return StepResult(messages, ...); it returned 'higher'",
            parser_of_another_family: "ConfigError: parser='hermes' finds no call in the chat template's own, which",
        },
    )


def fit_again_after_a_failure() -> list[float]:
    """Return the rewards of a run after its reward function failed and was repaired."""
    broken = [True]

    def mended_later(prompts: Sequence[object], **columns: Any) -> list[float]:
        if broken[0] and "prompt 3" in prompts:
            raise ValueError("not yet")
        return runs.low_tokens(columns["completion_ids"])

    module = runs.grpo(reward=mended_later)
    trainer = runs.trainer(ReallocStrategy("static"), WORLD_SIZE)
    with pytest.raises(RewardError):
        trainer.fit(module, Batches(1))
    broken[0] = False
    trainer.fit(module, Batches(1))
    return module.rewards[-1]


def test_a_run_can_continue_after_its_reward_function_was_repaired(workers: WorkerPool) -> None:
    first, second = workers.run(fit_again_after_a_failure, world_size=WORLD_SIZE, init_process_group=False)
    assert first == second
    assert len(first) == 12


def failing_elsewhere() -> str:
    """Return this rank's error after an exception in user code on one rank."""
    try:
        make_and_fit(failing_inference, runs.Record())
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "not raised"


def test_an_exception_of_user_code_keeps_its_type_on_its_rank(workers: WorkerPool) -> None:
    texts = workers.run(failing_elsewhere, world_size=WORLD_SIZE, init_process_group=False)
    assert sorted(text.split(":")[0] for text in texts) == ["ArithmeticError", "ReallocError"]
    assert all("overflow" in text for text in texts)


def test_a_group_of_one_or_a_greedy_group_is_refused_by_the_constructor() -> None:
    with pytest.raises(ConfigError, match=r"sampling\.n=1: a group needs 2 or more responses to compare; set n >= 2"):
        runs.grpo(sampling=SamplingParams(n=1))
    with pytest.raises(ConfigError, match=r"sampling\.temperature=0 gives every response of a group the same tokens"):
        runs.grpo(sampling=SamplingParams(n=2, temperature=0.0))


def test_the_error_of_another_strategy_names_the_one_that_is_needed(workers: WorkerPool) -> None:
    (found,) = workers.run(run_under_another_strategy, world_size=1, init_process_group=False)
    told = "SFT needs Trainer(strategy='realloc'), which runs its calls; this Trainer has SingleDeviceStrategy"
    assert found == [(told, ["run_under_another_strategy", "fit"])] * 3  # no frames of the fit itself


def run_under_another_strategy() -> list[tuple[str, list[str]]]:
    """Fit SFT without the strategy, and return each error with the functions in its traceback.

    The model is a module, a configuration and a folder, which is never read.
    """
    found = []
    for actor in (tiny_model("llama"), tiny_model("llama").config, "no/folder"):
        try:
            runs.trainer("auto", 1).fit(runs.sft(actor=actor), Batches(1, responses=True))
        except ConfigError as error:
            found.append((str(error), [frame.name for frame in traceback.extract_tb(error.__traceback__)]))
    return found


def test_misspelt_settings_are_refused_by_the_constructor() -> None:
    for options, message in (
        ({"overlap": "always"}, "overlap='always' must be one of iterations, calls, none"),
        ({"transport": "pull"}, "transport='pull' must be one of auto, push, direct"),
    ):
        with pytest.raises(ConfigError, match=message):
            ReallocStrategy(**options)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="plan='heuristics' is neither 'heuristic' nor 'static', and there is no such"):
        ReallocStrategy("heuristics")
    with pytest.raises(PlanError, match=r"plan=\[1\] is a list; give a path, a mapping, or an ExecutionPlan"):
        ReallocStrategy([1])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"sampling=\{'n': 8\} is a dict; write SamplingParams"):
        runs.grpo(sampling={"n": 8})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"gradient_clip_val": 1.0}, r"^gradient_clip_val=1\.0 of the .*TrainOptions\(max_grad_norm=1\.0\)"),
        ({"accumulate_grad_batches": 2}, r"^accumulate_grad_batches=2 of .*TrainOptions\(micro_batch_tokens=\.\.\.\)"),
        (
            {"gradient_clip_val": 0.5, "accumulate_grad_batches": 4},
            r"^gradient_clip_val=0\.5 and accumulate_grad_batches=4 of .*max_grad_norm=0\.5, micro_batch_tokens=",
        ),
    ],
)  # fmt: skip
def test_gradient_settings_of_the_trainer_are_refused_by_name(given: dict[str, Any], words: str) -> None:
    trainer = L.Trainer(**given, logger=False, enable_checkpointing=False, accelerator="cpu")
    with pytest.raises(MisconfigurationException, match=words):
        refuse_gradient_settings(trainer, "GRPO")


def too_many_minibatches() -> Any:
    """More optimizer steps than samples, which is known before generation."""
    return runs.grpo(train_options=runs.options(num_minibatches=100)), "heuristic", Batches(1)


def test_more_minibatches_than_samples_are_refused_before_generation(workers: WorkerPool) -> None:
    expect(workers, {too_many_minibatches: "num_minibatches=100 needs as many samples in an iteration, and this one"})


# ---- objects of other libraries


def rows_in_place_of_batches() -> Any:
    """A list of rows, which other trainers accept."""
    return runs.sft(), "heuristic", [{"prompt": "a", "completion": "b"}] * 2


def prompts_for_kto() -> Any:
    """Prompts without responses and labels."""
    return KTO(tiny_model("llama"), tokenizer=byte_tokenizer()), "heuristic", Batches(1)


def demonstrations_for_grpo() -> Any:
    """Prompts with responses, for an algorithm that makes its own."""
    rows = [{"prompt": "a", "completion": "b"}] * 6
    return runs.grpo(), "heuristic", SFTDataModule(rows, batch_size=6)


def test_the_error_of_a_wrong_batch_names_the_data_module_or_columns(workers: WorkerPool) -> None:
    expected = {
        rows_in_place_of_batches: "the loader gave a list; give trainer.fit(model, SFTDataModule(data, batch_size=",
        demonstrations_for_grpo: "generates its responses, and the batch holds some already, as those of SFTDataModul",
        prompts_for_kto: "KTO needs response_ids, label, and the batch has prompt",
    }
    expect(workers, expected)


def other_callbacks(folder: str) -> tuple[str, list[str]]:
    """Return the error for a callback of transformers, and the files of a reward model that names no role."""
    try:
        runs.trainer(ReallocStrategy(), 1, callbacks=[TrainerCallback()]).fit(runs.sft(), Batches(1, responses=True))
        said = "not refused"
    except ConfigError as error:
        said = str(error)
    pairs = PreferenceDataModule([{"prompt": "a", "chosen": "b", "rejected": "c"}], batch_size=1)
    fitted = runs.trainer(ReallocStrategy(), 1, callbacks=[SaveHuggingFace(folder)])
    fitted.fit(RewardModel(tiny_scorer("llama"), tokenizer=byte_tokenizer()), pairs)
    return said, sorted(path.name for path in Path(folder).iterdir())


def test_callbacks_of_transformers_are_refused_and_a_single_role_needs_no_name(
    workers: WorkerPool, tmp_path: Path
) -> None:
    ((said, files),) = workers.run(other_callbacks, str(tmp_path), world_size=1, init_process_group=False)
    assert "and a TrainerCallback is one of transformers.trainer_callback without their hooks; write a light" in said
    assert {"config.json", "model.safetensors"} <= set(files)


TRAINER_SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"gradient_clip_val": 0.5}, "gradient_clip_val=0.5 of the Trainer does not .*TrainOptions(max_grad_norm=0.5) of"),
    ({"accumulate_grad_batches": 4}, "accumulate_grad_batches=4 of the Trainer does not .*(micro_batch_tokens=...) of"),
    (
        {"gradient_clip_val": 0.5, "accumulate_grad_batches": 4},
        "gradient_clip_val=0.5 and accumulate_grad_batches=4 of the Trainer do not .*5, micro_batch_tokens=...) of R",
    ),
    ({"callbacks": [LearningRateFinder()]}, "the learning-rate finder reads the loss .* RecordedGRPO returns none"),
    ({"callbacks": [BatchSizeFinder()]}, "the batch-size finder cannot change a batch of RecordedGRPO"),
    (
        {"callbacks": [ModelCheckpoint(train_time_interval=timedelta(minutes=5))], "enable_checkpointing": True},
        "ModelCheckpoint(train_time_interval=0:05:00) would never save",
    ),
]


@pytest.mark.parametrize(("settings", "rule"), TRAINER_SETTINGS, ids=[str(n) for n in range(len(TRAINER_SETTINGS))])
def test_settings_of_the_trainer_that_do_nothing_are_refused(settings: dict[str, Any], rule: str) -> None:
    module, strategy = runs.grpo(), ReallocStrategy()
    module.trainer = runs.trainer(strategy, 1, **settings)
    pattern = ".*".join(map(re.escape, rule.split(".*")))
    with pytest.raises((ConfigError, MisconfigurationException), match=pattern):
        strategy.connect(module)


def found_learning_rate() -> str:
    """Return the error of Lightning's learning-rate finder."""
    try:
        Tuner(runs.trainer(ReallocStrategy(), 1)).lr_find(runs.sft(), Batches(1, responses=True))
    except ConfigError as error:
        return str(error)
    return "not refused"


def test_the_learning_rate_finder_is_refused(workers: WorkerPool) -> None:
    (said,) = workers.run(found_learning_rate, world_size=1, init_process_group=False)
    assert "the learning-rate finder reads the loss that training_step returns, and SFT returns none" in said


def loader_as_datamodule() -> str:
    """Return the error for a loader that is given as a data module."""
    loader: Any = torch.utils.data.DataLoader([{"prompt": "a", "completion": "b"}])
    try:
        runs.trainer(ReallocStrategy(), 1).fit(runs.sft(), datamodule=loader)
    except ConfigError as error:
        return str(error)
    return "not refused"


def test_a_loader_as_a_data_module_is_refused(workers: WorkerPool) -> None:
    (said,) = workers.run(loader_as_datamodule, world_size=1, init_process_group=False)
    assert "datamodule= takes a LightningDataModule, and this is a DataLoader; give rows as PromptDataModule(" in said


def seeds() -> tuple[int, int, list[int]]:
    """Return the seeds and the order of rows of a run whose ranks are seeded differently."""
    L.seed_everything(7 + int(os.environ["RANK"]), verbose=False)
    rows = [{"prompt": str(number), "completion": "b"} for number in range(8)]
    module, data = runs.sft(), SFTDataModule(rows, batch_size=8)
    runs.trainer(ReallocStrategy(), WORLD_SIZE, max_steps=1).fit(module, data)
    return module.seed, data.seed, next(iter(data.train_dataloader())).ids.tolist()


def test_ranks_with_different_seeds_use_the_seed_of_the_first(workers: WorkerPool) -> None:
    first, second = workers.run(seeds, world_size=WORLD_SIZE, init_process_group=False)
    assert first == second and first[:2] == (7, 7)
