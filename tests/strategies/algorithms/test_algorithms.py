"""Every policy algorithm trains the same on one rank as on two ranks under two plans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import cycle
from typing import Any

import pytest
import torch
from torch.optim import SGD

from lightning_realloc import (
    GRPO,
    KL,
    PPO,
    RLOO,
    AdaptiveEntropy,
    BestOfN,
    Cispo,
    Clip,
    ClipCov,
    ConfigError,
    DynamicSampling,
    GenerationOptions,
    OnlineDPO,
    OnPolicyDistillation,
    ReinforcePlusPlus,
    ReMax,
    RolloutBudget,
    TopShare,
)
from lightning_realloc.algorithms.base.module import MultiModelModule
from lightning_realloc.batch.training import TrainOptions
from lightning_realloc.rewards import OverlongPenalty
from lightning_realloc.strategies import ReallocStrategy
from tests.matrices import matrix, selected
from tests.models import byte_tokenizer, tiny_model, tiny_scorer
from tests.strategies import runs
from tests.strategies.pool.test_set_plan import Move
from tests.strategies.runs import Batches
from tests.workers import WorkerPool

# Plain gradient descent: AdamW turns rounding of a tiny gradient into a whole step.
DESCENT = partial(SGD, lr=0.2)
LAYOUTS = {
    "fsdp": {"generate": "dp2", "infer": "dp2", "train": "fsdp2"},
    "pp": {"generate": "tp2", "infer": "tp2", "train": "pp2"},
    "alone": {"generate": "dp1", "infer": "dp1", "train": "dp1"},
}
SEVERAL = TrainOptions(num_epochs=2, num_minibatches=2)
OPTIMIZED = {"optimizer": DESCENT, "sampling": runs.SAMPLING}
LORA = {"peft_type": "LORA", "r": 4, "target_modules": ["q_proj", "v_proj"]}
DAPO = {
    "kl_coef": 0.0, "policy_loss": Clip(high=0.28), "loss_average": "token", "dynamic_sampling": DynamicSampling(),
    "reward": [runs.low_tokens, OverlongPenalty(max_length=6, buffer=3)], "learn_truncated": False,
}  # fmt: skip


def ends_early(completion_ids: Sequence[Sequence[int]], **columns: object) -> list[float]:
    """Reward all short responses equally, so that many groups have equal rewards."""
    return [float(len(ids) < 4) for ids in completion_ids]


Case = tuple[type[MultiModelModule], Mapping[str, Any]]
CASES: Mapping[str, Case] = {
    "dr_grpo": (GRPO, {"advantages": "group_mean", "loss_average": "constant", "kl_coef": 0.0}),
    "gdpo": (
        GRPO, {"advantages": "group_each", "reward": [runs.low_tokens, ends_early], "reward_weights": [1.0, 0.5],
               "missing_eos_penalty": 0.2},
    ),
    "dapo": (GRPO, DAPO),
    "refilled": (GRPO, {"reward": ends_early, "dynamic_sampling": DynamicSampling(max_refills=2), "kl_coef": 0.1}),
    "gspo": (GRPO, {"ratio_level": "sequence", "train_options": SEVERAL}),
    "cispo": (GRPO, {"policy_loss": Cispo(high=4.0), "kl_coef": 0.04, "entropy_coef": 0.01}),
    "corrected": (
        GRPO, {"correction": "token-truncate", "train_options": SEVERAL, "kl": KL(0.04, place="reward")},
    ),
    "marked": (GRPO, {"entropy": TopShare(share=0.5), "correction": "sequence-mask", "train_options": SEVERAL}),
    "adaptive": (GRPO, {"entropy": AdaptiveEntropy(target=9.0, step=0.1)}),
    "ppo_marked": (PPO, {"entropy": ClipCov(share=0.2, low=0.01), "correction": "reject", "train_options": SEVERAL}),
    "rloo": (RLOO, {"train_options": SEVERAL}),
    "reinforce": (ReinforcePlusPlus, {}),
    "reinforce_baseline": (ReinforcePlusPlus, {"baseline": "group", "discount": 0.9}),
    "remax": (ReMax, {}),
    "rloo_scored": (
        RLOO, {"reward": [runs.low_tokens, tiny_scorer("llama"), tiny_scorer("llama", seed=5)],
               "reward_weights": [1.0, 0.1, -0.1]},
    ),
    "remax_scored": (ReMax, {"reward": tiny_scorer("llama")}),
    "best_of_n": (BestOfN, {}),
    "online_dpo": (OnlineDPO, {"train_options": TrainOptions(num_minibatches=2)}),
    "online_dpo_lora": (OnlineDPO, {"peft_config": LORA}),
    "distilled": (OnPolicyDistillation, {}),
    "distilled_js": (OnPolicyDistillation, {"divergence": "js"}),
    "distilled_lora": (OnPolicyDistillation, {"divergence": "reverse_kl", "peft_config": LORA}),
}  # fmt: skip


def module_of(name: str) -> Any:
    """Return a fresh module of a case, on tiny llamas."""
    kind, settings = CASES[name]
    given = {**OPTIMIZED, "tokenizer": byte_tokenizer(), **settings}
    if kind is OnPolicyDistillation:
        return kind(tiny_model("llama"), tiny_model("llama", seed=1), **given)
    recorded = type(f"Recorded{kind.__name__}", (runs.Recorded, kind), {})
    reward = given.pop("reward", runs.low_tokens)
    return recorded(tiny_model("llama"), reward, reference=tiny_model("llama", seed=1), **given)


NUM_ITERATIONS = {"refilled": 6, "distilled_js": 3}
"""Of other cases: 2. The second one generates from updated weights."""


def fit(cases: Sequence[str]) -> dict[str, runs.Outcome]:
    """Train every case under its plan."""
    world_size, found = runs.world_size(), {}
    for case in cases:
        name, layout = case.split()
        module = module_of(name)
        plan = {call.name: LAYOUTS[layout][call.kind] for call in module.dataflow.model_calls}
        found[case] = runs.train(module, {"calls": plan}, world_size, Batches(NUM_ITERATIONS.get(name, 2)))
    return found


EXHAUSTIVE = {
    "dr_grpo", "gspo", "rloo", "reinforce", "rloo_scored", "remax_scored", "online_dpo_lora", "distilled",
    "distilled_lora", "adaptive", "gdpo", "marked", "reinforce_baseline", "cispo",
}  # fmt: skip
"""Cases with settings that other cases, or faster tests, guard."""
IN_PLANS = [f"{name} {layout}" for name in CASES for layout in ("fsdp", "pp")]
BOUNDARIES = [
    f"{name} {layout}" for name, layout in zip((n for n in CASES if n not in EXHAUSTIVE), cycle(("fsdp", "pp")))
]
"""Every case in one of the two plans, in turn."""
NEEDED = ("refilled", "best_of_n", "online_dpo", "remax", "distilled_js")
"""Cases whose outcomes several tests read."""


@pytest.fixture(scope="module")
def everything(workers: WorkerPool, request: pytest.FixtureRequest) -> dict[str, runs.Outcome]:
    """Outcomes of the selected cases on two ranks, and on one."""
    cases = selected(request, "case")
    on_one = [f"{name} alone" for name in dict.fromkeys([*(case.split()[0] for case in cases), *NEEDED])]
    (alone,) = workers.run(fit, on_one, world_size=1, init_process_group=False, deadline_s=120.0)
    together = workers.run(fit, cases, world_size=2, init_process_group=False, deadline_s=240.0)
    for case in cases:
        assert together[0][case].logged == together[1][case].logged
    return alone | together[0]  # type: ignore[no-any-return]


LOGGED = {
    "dapo": {"refills", "differing_groups", "waiting_groups", "reward/OverlongPenalty"},
    "refilled": {"refills", "actor/kl"},
    "cispo": {"actor/entropy", "actor/kl"},
    "corrected": {
        "actor/engine_difference",
        "actor/engine_kl",
        "actor/correction_weight",
        "actor/correction_excluded",
        "actor/correction_truncated",
        "actor/effective_sample_size",
        "kl_k1",
    },
    "marked": {"actor/marked_tokens", "actor/effective_sample_size"},
    "adaptive": {"entropy_coef", "actor/entropy"},
    "ppo_marked": {"actor/marked_tokens", "actor/correction_excluded", "actor/behaviour_kl"},
    "rloo": {"kl_k1"},
    "remax": {"kl_k1", "greedy_reward"},
    "rloo_scored": {"reward/low_tokens", "reward/reward", "reward/reward_2"},
    "best_of_n": {"kept", "reward_of_all", "actor/nll"},
    "online_dpo": {"pairs", "reward_of_all", "actor/margin", "actor/accuracy"},
    "distilled": {"actor/reverse_kl"},
    "distilled_js": {"actor/js"},
}


@pytest.mark.slow
@pytest.mark.parametrize("case", matrix(IN_PLANS, *BOUNDARIES))
def test_every_algorithm_gives_the_same_results_on_one_rank_and_on_two(everything: Any, case: str) -> None:
    name = case.split()[0]
    alone, outcome = everything[f"{name} alone"], everything[case]
    assert alone.logged[-1]["actor/grad_norm"] > 0
    if "peft_config" not in CASES[name][1]:
        assert runs.largest_difference(alone.weights, tiny_model("llama").state_dict()) > 1e-4
    assert LOGGED.get(name, set()) | {"actor/loss", "actor/grad_norm"} <= set(alone.logged[-1])
    assert outcome.tokens == alone.tokens
    assert outcome.steps == alone.steps
    for ours, theirs in zip(outcome.logged, alone.logged, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5, rel=1e-5)
    assert runs.largest_difference(outcome.weights, alone.weights) <= 1e-5


def test_groups_with_equal_rewards_are_replaced_before_the_step(everything: Any) -> None:
    alone = everything["refilled alone"]
    assert alone.steps == [0, 1, 1, 2, 2, 3]
    for rewards in alone.rewards:
        groups = [set(rewards[first : first + 2]) for first in range(0, len(rewards), 2)]
        assert len(groups) == 6 and all(group == {0.0, 1.0} for group in groups)


def test_training_uses_only_the_chosen_samples(everything: Any) -> None:
    best, pairs = (everything[f"{name} alone"] for name in ("best_of_n", "online_dpo"))
    for tokens, logged in zip(best.tokens, best.logged, strict=True):
        assert len(tokens) == 6  # one of two per prompt
        assert logged["reward"] >= logged["reward_of_all"]
    for rewards in pairs.rewards:
        assert all(chosen > rejected for chosen, rejected in zip(rewards[::2], rewards[1::2], strict=True))


def test_the_baseline_of_remax_is_the_greedy_response_and_is_not_trained_on(everything: Any) -> None:
    alone = everything["remax alone"]
    model: Any = tiny_model("llama")
    greedy = []
    for prompt in next(iter(Batches(1))).ragged("prompt_ids").to_lists():
        answer = model.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=runs.SAMPLING.max_new_tokens, pad_token_id=0,
            eos_token_id=list(runs.SAMPLING.stop_token_ids),
        )[0, len(prompt) :].tolist()  # fmt: skip
        greedy.append(answer)
    assert alone.logged[0]["greedy_reward"] == pytest.approx(sum(runs.low_tokens(greedy)) / len(greedy))
    assert len(alone.tokens[0]) == len(greedy) * runs.SAMPLING.n


SHARES = {"actor.generate": "dp2", "teacher.infer": "dp1@1", "actor.train": "tp2"}
"""Each rank trains with a share of the vocabulary, and so with a share of the teacher's head."""


def distil_in_shares() -> runs.Outcome:
    """Train with shares of the vocabulary; exchange the shares after step 1, and use all logits after step 2."""
    moves = {step: {"calls": SHARES | {"actor.train": layout}} for step, layout in ((1, "tp2@1,0"), (2, "fsdp2"))}
    module = module_of("distilled_js")
    return runs.train(module, {"calls": SHARES}, runs.world_size(), Batches(3), callbacks=[Move(moves)])


def test_the_teachers_head_is_split_like_the_students(everything: Any, workers: WorkerPool) -> None:
    alone = everything["distilled_js alone"]
    shared, _ = workers.run(distil_in_shares, world_size=2, init_process_group=False, deadline_s=60.0)
    for ours, theirs in zip(shared.logged, alone.logged, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5, rel=1e-5)
    assert runs.largest_difference(shared.weights, alone.weights) <= 1e-5


def refusals() -> list[str]:
    """Return the errors of settings that work ahead of the choice of samples."""
    said = []
    for strategy, settings in (
        (ReallocStrategy(max_staleness=1), {}),
        (ReallocStrategy(generation_chunks=2), {}),
        (ReallocStrategy(), {"generation": GenerationOptions(rollout_budget=RolloutBudget(tokens=9))}),
    ):
        module = BestOfN(tiny_model("llama"), runs.low_tokens, tokenizer=byte_tokenizer(), **settings)
        with pytest.raises(ConfigError) as caught:
            runs.trainer(strategy, 1).fit(module, Batches(1))
        said.append(str(caught.value))
    return said


def test_settings_that_work_ahead_of_the_choice_of_samples_are_refused(workers: WorkerPool) -> None:
    (said,) = workers.run(refusals, world_size=1, init_process_group=False)
    for text, way_out in zip(said, ("max_staleness=0", "generation_chunks=1", "leave rollout_budget out"), strict=True):
        assert "BestOfN chooses among" in text and way_out in text
