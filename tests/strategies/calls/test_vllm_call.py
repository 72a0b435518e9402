"""Algorithms with ``engine="vllm"``: iterations on a stand-in for vLLM and on vLLM itself, layouts, settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lightning_realloc import GRPO, ConfigError, Correction, GenerationOptions, Speculation
from lightning_realloc.errors import GenerationError
from lightning_realloc.generation import SamplingParams, VLLMOptions
from lightning_realloc.layout import Layout
from lightning_realloc.strategies import ReallocStrategy
from lightning_realloc.strategies.generation_limits import refuse_generation_layout
from tests.devices import CPU_ALONE
from tests.generation.vllm.stand_in import notes, stand_in
from tests.generation.vllm.test_vllm_engine import is_running
from tests.models import byte_tokenizer, tiny_model
from tests.strategies import runs
from tests.strategies.peft.peft_runs import adapted_grpo
from tests.strategies.runs import Batches, Outcome
from tests.vllm_environment import vllm_python
from tests.workers import WorkerFailure, WorkerPool


def with_vllm(options: VLLMOptions, **settings: Any) -> runs.RecordedGRPO:
    """Return GRPO with the engine."""
    return runs.grpo(engine="vllm", generation=GenerationOptions(vllm=options), **settings)


def run(options: VLLMOptions, layout: str, world_size: int) -> Outcome:
    """Return the outcome of two iterations that generate in a layout."""
    plan = runs.calls(actor_generate=layout, actor_train=f"dp{world_size}", reference_infer=f"dp{world_size}")
    return runs.train(with_vllm(options), plan, world_size, Batches(2))


@CPU_ALONE
def test_every_iteration_hands_weights_over_and_the_processes_end_with_the_run(
    workers: WorkerPool, tmp_path: Path
) -> None:
    options = VLLMOptions(python=stand_in(tmp_path))
    outcome = workers.run(run, options, "dp2", 2, world_size=2, init_process_group=False)[0]
    assert len(notes(tmp_path, "weights")) == 4 and len(set(notes(tmp_path, "weights"))) == 4, "2 ranks, 2 iterations"
    processes = list(map(int, notes(tmp_path, "started")))
    assert len(processes) == 2 and not any(map(is_running, processes))
    prompts = [sample.ragged("prompt_ids").to_lists() for sample in Batches(2)]
    for tokens, rows in zip(outcome.tokens, prompts, strict=True):
        assert [made[0] for made in tokens] == [(row[-1] + 1) % 128 for row in rows for _ in range(2)]
    # The stand-in reports log-probabilities of -1, far from the model's; the weights correct for it.
    assert outcome.logged[0]["actor/engine_difference"] > 0.5 and "actor/correction_weight" in outcome.logged[0]


@CPU_ALONE
def test_tensor_parallel_ranks_share_one_vllm_and_make_the_samples_of_one_rank(
    workers: WorkerPool, tmp_path: Path
) -> None:
    def outcome(layout: str) -> Outcome:
        folder = tmp_path / layout
        folder.mkdir()
        options = VLLMOptions(python=stand_in(folder))
        found, other = workers.run(run, options, layout, 2, world_size=2, init_process_group=False)
        assert found.tokens == other.tokens
        return found

    whole, shared = outcome("dp2"), outcome("tp2")
    assert len(notes(tmp_path / "tp2", "started")) == 1 and len(notes(tmp_path / "tp2", "weights")) == 2
    (settings,) = map(json.loads, notes(tmp_path / "tp2", "settings"))
    assert settings["llm"]["tensor_parallel_size"] == 2
    assert shared.tokens == whole.tokens and shared.rewards == whole.rewards
    given = [one.logged[-1]["given_bytes/actor.generate"] for one in (whole, shared)]
    least = [one.logged[-1]["given_bytes_minimum/actor.generate"] for one in (whole, shared)]
    num_bytes = sum(parameter.nbytes for parameter in tiny_model("llama").parameters())
    assert given == [2 * num_bytes, num_bytes] and least == [num_bytes, num_bytes]


def run_adapters(options: VLLMOptions, layout: str, world_size: int) -> Outcome:
    """Return the outcome of two iterations that train adapters and generate in a layout."""
    plan = runs.calls(actor_generate=layout, actor_train=f"dp{world_size}", reference_infer=f"dp{world_size}")
    return runs.train(
        adapted_grpo(engine="vllm", generation=GenerationOptions(vllm=options)), plan, world_size, Batches(2)
    )


@CPU_ALONE
@pytest.mark.parametrize(("layout", "world_size", "merges"), [("dp1", 1, False), ("tp2", 2, False), ("dp1", 1, True)])
def test_the_base_is_handed_over_once_and_then_adapters_alone_unless_they_are_merged(
    layout: str, world_size: int, merges: bool, workers: WorkerPool, tmp_path: Path
) -> None:
    options = VLLMOptions(python=stand_in(tmp_path), merge_adapters=merges)
    outcome = workers.run(run_adapters, options, layout, world_size, world_size=world_size, init_process_group=False)[0]
    (settings,) = map(json.loads, notes(tmp_path, "settings"))
    whole, alone = (notes(tmp_path, kind) for kind in ("weights", "adapters"))
    assert (len(whole), len(alone)) == ((2, 0) if merges else (1, 2))
    assert settings["llm"].get("enable_lora", False) is not merges
    first, second = (logged["given_bytes/actor.generate"] for logged in outcome.logged)
    assert first == second if merges else 0 < 8 * second < first


class Thawing(runs.RecordedGRPO):
    """GRPO that trains a norm beside its adapters."""

    def configure_model(self) -> None:
        """Let the norm require gradients."""
        super().configure_model()
        self.models()["actor"].get_parameter("model.norm.weight").requires_grad_(True)


def fit_with_a_trained_norm(options: VLLMOptions) -> None:
    """Train adapters and a norm."""
    module = adapted_grpo(module_class=Thawing, engine="vllm", generation=GenerationOptions(vllm=options))
    runs.train(module, "static", 1, Batches(1))


@CPU_ALONE
def test_weights_that_train_beside_adapters_are_refused(workers: WorkerPool, tmp_path: Path) -> None:
    options = VLLMOptions(python=stand_in(tmp_path))
    with pytest.raises(WorkerFailure, match=r"actor trains model\.norm\.weight as well \(1 such parameters\); freeze"):
        workers.run(fit_with_a_trained_norm, options, world_size=1, init_process_group=False)


@pytest.mark.parametrize(
    ("layout", "address", "message"),
    [
        ("fsdp2", None, "cannot generate by engine='vllm'; give it a layout with fsdp=1"),
        ("pp2", None, "whose ranks hold a stage each, and engine='vllm' needs all layers on a rank"),
        ("dp2", "http://127.0.0.1:9", "of 2 ranks, which would all give weights to the server http://127.0.0.1:9"),
        ("tp2", "http://127.0.0.1:9", "of 2 ranks, which would all give weights to the server http://127.0.0.1:9"),
    ],
)
def test_layouts_that_vllm_cannot_take_weights_from_are_refused(layout: str, address: str | None, message: str) -> None:
    module = with_vllm(VLLMOptions(address=address))
    with pytest.raises(GenerationError, match=message):
        refuse_generation_layout(module, "actor.generate", Layout.parse(layout))


class Unbuilt(GRPO):
    """Fails where models are built."""

    def configure_model(self) -> None:
        """Fail."""
        raise AssertionError("models are built before the plan is checked")


def fit_in_stages() -> None:
    """Train in a layout that vLLM cannot take weights from."""
    module = Unbuilt(tiny_model("llama"), runs.low_tokens, engine="vllm", tokenizer=byte_tokenizer())
    runs.train(module, runs.calls(actor_generate="pp2", actor_train="dp2"), 2, Batches(1))


def test_a_layout_is_refused_before_models_are_built(workers: WorkerPool) -> None:
    with pytest.raises(WorkerFailure, match="engine='vllm' needs all layers on a rank"):
        workers.run(fit_in_stages, world_size=2, init_process_group=False)


def fit_unbuilt(options: VLLMOptions, layout: str) -> str:
    """Return the error of a run that must end before its models are built."""
    generation = GenerationOptions(vllm=options)
    module = Unbuilt(
        tiny_model("llama"), runs.low_tokens, engine="vllm", tokenizer=byte_tokenizer(), generation=generation
    )
    with pytest.raises(ConfigError) as caught:
        runs.train(module, runs.calls(actor_generate=layout, actor_train="dp2"), 2, Batches(1))
    return str(caught.value)


def test_interpreters_and_servers_are_checked_before_models_are_built_on_ranks_that_generate(
    workers: WorkerPool, tmp_path: Path
) -> None:
    def errors(layout: str = "dp1@1", **options: Any) -> str:
        given = VLLMOptions(**options), layout
        (error,) = set(workers.run(fit_unbuilt, *given, world_size=2, init_process_group=False))
        return str(error)

    nowhere = str(tmp_path / "none")
    assert errors(python=nowhere).startswith(f"vLLM's interpreter {nowhere} does not start: No such file")
    assert "python has vLLM 0.11.2, and" in errors("dp2", python=stand_in(tmp_path, "old"))
    assert not (tmp_path / "notes").exists(), "no vLLM was started"
    assert errors(address="http://127.0.0.1:9").startswith("the vLLM server http://127.0.0.1:9 does not answer")


@CPU_ALONE
def test_a_vllm_that_does_not_start_ends_the_run_with_its_cause_on_every_rank(
    workers: WorkerPool, tmp_path: Path
) -> None:
    options = VLLMOptions(python=stand_in(tmp_path, "warns and does not start"), restarts=3)
    cause = r"GenerationError: RuntimeError: no kernel for this device \(vLLM for actor on rank 1 does not start"
    with pytest.raises(WorkerFailure, match=cause):
        workers.run(run, options, "dp1@1", 2, world_size=2, init_process_group=False)
    assert len(notes(tmp_path, "started")) == 1


@CPU_ALONE
def test_a_lost_vllm_ends_the_run_on_every_rank_with_its_log(workers: WorkerPool, tmp_path: Path) -> None:
    with pytest.raises(WorkerFailure, match=r"vLLM's process ended by signal SIGKILL, .*segmentation fault"):
        options = VLLMOptions(python=stand_in(tmp_path, "dies"), restarts=0)
        workers.run(run, options, "dp2", 2, world_size=2, init_process_group=False)


@CPU_ALONE
def test_a_vllm_that_ends_once_is_restarted_and_the_run_is_the_same(workers: WorkerPool, tmp_path: Path) -> None:
    def outcome(behaviour: str) -> Outcome:
        folder = tmp_path / (behaviour or "lives")
        folder.mkdir()
        options = VLLMOptions(python=stand_in(folder, behaviour))
        (found,) = workers.run(run, options, "dp1", 1, world_size=1, init_process_group=False)
        return found

    whole, restarted = outcome(""), outcome("dies once")
    assert len(notes(tmp_path / "dies once", "started")) == 2
    assert restarted.tokens == whole.tokens and restarted.rewards == whole.rewards
    assert runs.largest_difference(restarted.weights, whole.weights) == 0.0


def run_ahead(options: VLLMOptions) -> Outcome:
    """Return the outcome of three iterations whose rank 1 generates one step ahead of rank 0."""
    plan = runs.calls(actor_generate="dp1@1", actor_train="dp1@0", reference_infer="dp1@0")
    module = with_vllm(options, ratio_to="behaviour")
    return runs.train(module, ReallocStrategy(plan, max_staleness=1), 2, Batches(3))


@CPU_ALONE
def test_generation_one_step_ahead_hands_weights_over_before_every_rollout(workers: WorkerPool, tmp_path: Path) -> None:
    options = VLLMOptions(python=stand_in(tmp_path))
    outcome = workers.run(run_ahead, options, world_size=2, init_process_group=False)[0]
    assert len(outcome.tokens) == len(set(notes(tmp_path, "weights"))) == 3
    (process,) = map(int, notes(tmp_path, "started"))
    assert not is_running(process)


def test_ratios_are_proximal_and_corrected_unless_given_otherwise() -> None:
    def settings(**given: Any) -> tuple[str, Correction | None]:
        module = GRPO(tiny_model("llama"), runs.low_tokens, sampling=runs.SAMPLING, **given)
        return module.ratio_to, module.correction

    assert settings() == settings(correction="none") == ("behaviour", None)
    assert settings(correction="token-truncate") == ("proximal", Correction())
    assert settings(engine="vllm") == ("proximal", Correction())
    assert settings(engine="vllm", correction="none") == ("proximal", None)
    assert settings(engine="vllm", ratio_to="behaviour") == ("behaviour", None)
    assert settings(engine="vllm", correction=Correction(cap=3.0))[1] == Correction(cap=3.0)
    assert settings(engine="vllm", policy_loss="vespo") == ("behaviour", None)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"speculation": Speculation()}, "needs an engine that drafts tokens, and engine='vllm' does not"),
        (
            {"generation": GenerationOptions(sample_reallocation=True)},
            "sample_reallocation=True needs an engine that hands samples over",
        ),
    ],
)
def test_what_needs_the_native_engine_is_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        runs.grpo(engine="vllm", **settings)


def test_options_of_vllm_need_its_engine() -> None:
    with pytest.raises(ConfigError, match=r"vllm=VLLMOptions.* needs an engine that runs vLLM, .* use engine='vllm'"):
        runs.grpo(generation=GenerationOptions(vllm=VLLMOptions(restarts=1)))
    assert runs.grpo(engine="vllm", generation=GenerationOptions(max_cache_bytes=9)).engine == "vllm"


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_vllm_generates_for_a_run_with_the_log_probabilities_that_training_computes() -> None:
    shape = {"hidden_size": 128}  # heads of 32, a size that vLLM has
    module = runs.grpo(
        engine="vllm",
        generation=GenerationOptions(vllm=VLLMOptions(python=vllm_python()), max_cache_bytes=1 << 26),
        actor=tiny_model("llama", **shape),
        reference=tiny_model("llama", seed=1, **shape),
        sampling=SamplingParams(n=4, max_new_tokens=8, temperature=0.7, top_p=0.95),
    )
    plan = runs.calls(actor_generate="dp1", actor_train="dp1", reference_infer="dp1")
    outcome = runs.train(module, plan, 1, Batches(4))
    for logged in outcome.logged:
        assert logged["actor/engine_difference"] < 1e-4, "weights change much in every iteration"
        assert logged["actor/correction_weight"] == pytest.approx(1.0, abs=1e-3)
    first, last = outcome.rewards[0], outcome.rewards[-1]
    assert sum(last) / len(last) > sum(first) / len(first)
