"""Distillation by hand: rewards of tokens, averages of divergences, and invalid settings."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_realloc import Clip, OnPolicyDistillation, SamplingParams
from lightning_realloc.batch.packing import pack
from lightning_realloc.batch.ragged import Ragged
from lightning_realloc.batch.samples import Samples
from lightning_realloc.batch.training import Totals, pack_columns
from lightning_realloc.errors import ConfigError
from lightning_realloc.runtime.parallel.packed_forward import predicting_states
from tests.algorithms.test_grpo import CPU, PROMPTS, RESPONSES, response_logprobs, rollout
from tests.models import byte_tokenizer, tiny_model
from tests.runtime.forward.test_tiled_logits import Clamped, tiles

TEMPERATURE = 0.7


def module_of(student: Any, teacher: Any, **settings: Any) -> OnPolicyDistillation:
    """Return distillation of these models."""
    settings = {"sampling": SamplingParams(temperature=TEMPERATURE), "tokenizer": byte_tokenizer(), **settings}
    return OnPolicyDistillation(student, teacher, **settings)


def loss_in_parts(module: OnPolicyDistillation, model: Any, samples: Samples) -> Any:
    """Return the loss of two micro-batches, after backward."""
    model.zero_grad()
    parts = [
        module.actor_loss(model, pack_columns(samples.select(rows), CPU), Totals(4, 9)) for rows in ([0, 2], [1, 3])
    ]
    loss = parts[0].value + parts[1].value
    loss.backward()
    return loss.detach()


def test_a_sampled_tokens_reward_is_the_teachers_log_ratio() -> None:
    student, again, teacher = tiny_model("llama"), tiny_model("llama"), tiny_model("llama", seed=1)
    module = module_of(student, teacher, policy_loss=Clip(low=0.9, high=9.0))
    samples = rollout().without_columns("advantages", "ref_logprobs")
    scored = module.score_teacher(teacher, pack(samples)).detach()
    samples = samples.with_columns(teacher_logprobs=pack(samples).responses(scored))
    found = loss_in_parts(module, student, samples)
    total, pieces = torch.zeros(()), zip(PROMPTS, RESPONSES, samples.ragged("behaviour_logprobs").split(), strict=True)
    for prompt, response, behaviour in pieces:
        now = response_logprobs(again, prompt, response, TEMPERATURE)
        likelier = response_logprobs(teacher, prompt, response, TEMPERATURE).detach() - behaviour
        total = total - ((now - behaviour).exp() * likelier).sum()
    (total / 9).backward()
    assert found.item() == pytest.approx(float(total.detach()) / 9, abs=1e-5)
    for ours, theirs in zip(student.parameters(), again.parameters(), strict=True):
        assert torch.allclose(ours.grad, theirs.grad, atol=2e-6)


@pytest.mark.parametrize(
    ("divergence", "family", "settings"),
    [
        ("reverse_kl", "llama", {}), ("forward_kl", "llama", {}), ("js", "llama", {}),
        ("reverse_kl", "gemma2", {"final_logit_softcapping": 0.2}), ("js", "gemma2", {"final_logit_softcapping": 0.2}),
        ("forward_kl", "granite_swa", {"logits_scaling": 0.3}),
    ],
)  # fmt: skip
def test_divergences_over_the_vocabulary_are_averaged_over_tokens(
    divergence: Any, family: str, settings: dict[str, float]
) -> None:
    student, again, teacher = (tiny_model(family, seed=seed, **settings) for seed in (0, 0, 1))
    module = module_of(student, teacher, divergence=divergence, mix=0.25)
    module.configure_model()
    samples = rollout().without_columns("advantages", "ref_logprobs")
    with torch.no_grad():
        states = predicting_states(teacher, pack(samples))
    samples = samples.with_columns(teacher_states=pack(samples).responses(states))
    with tiles():
        found = loss_in_parts(module, student, samples)
    total = torch.zeros(())
    for prompt, response in zip(PROMPTS, RESPONSES, strict=True):
        logits = [m(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1] for m in (again, teacher)]
        s, t = ((each / TEMPERATURE).softmax(-1) for each in logits)
        t = t.detach()
        m = 0.25 * t + 0.75 * s
        js = 0.25 * (t * (t / m).log()).sum() + 0.75 * (s * (s / m).log()).sum()
        kinds = {"reverse_kl": (s * (s / t).log()).sum(), "forward_kl": (t * (t / s).log()).sum(), "js": js}
        total = total + kinds[divergence]
    (total / 9).backward()
    assert found.item() == pytest.approx(float(total.detach()) / 9, abs=1e-5)
    for ours, theirs in zip(student.parameters(), again.parameters(), strict=True):
        assert torch.allclose(ours.grad, theirs.grad, atol=2e-6)


def test_the_divergence_decides_whether_the_teacher_gives_logprobs_or_states() -> None:
    student, teacher = tiny_model("llama"), tiny_model("llama", seed=1)
    sampled, whole = (module_of(student, teacher, divergence=kind).dataflow for kind in ("sampled", "js"))
    assert [c.name for c in sampled.iteration_calls] == ["actor.generate", "teacher.infer", "actor.train"]
    assert sampled.call("teacher.infer").produces == ("teacher_logprobs",)
    assert [c.name for c in whole.calls] == ["actor.generate", "teacher.infer", "actor.train"]
    assert whole.call("teacher.infer").produces == ("teacher_states",)
    assert whole.call("actor.train").needs == ("rollout", "teacher_states")


def test_the_divergence_of_held_out_responses_is_estimated() -> None:
    module = module_of(tiny_model("llama"), tiny_model("llama"))
    lengths = torch.tensor([2, 1])
    samples = Samples(
        torch.arange(2),
        {
            "behaviour_logprobs": Ragged(torch.tensor([-1.0, -2.0, -0.5]), lengths),
            "teacher_logprobs": Ragged(torch.tensor([-1.5, -2.5, -0.25]), lengths),
        },
    )
    assert module.measure(samples)["reverse_kl"].tolist() == [1.0, -0.25]  # type: ignore[union-attr]


def test_invalid_teachers_and_settings_are_refused() -> None:
    student = tiny_model("llama")
    for settings, message in (
        ({"divergence": "kl"}, "divergence='kl' must be one of sampled, reverse_kl, forward_kl, js"),
        ({"mix": 1.0}, "mix=1.0 must lie between 0 and 1"),
        ({"sampling": SamplingParams(temperature=0.0)}, "temperature=0"),
    ):
        with pytest.raises(ConfigError, match=message):
            module_of(student, student, **settings)
    with pytest.raises(ConfigError, match="teacher has another vocabulary than the actor: 96 tokens"):
        module_of(student, tiny_model("llama", vocab_size=96)).configure_model()
    clamped = tiny_model("llama")
    clamped.__class__ = Clamped
    with pytest.raises(ConfigError, match=r"Clamped does not compute its logits as .* \(divergence='sampled'\)"):
        module_of(student, clamped, divergence="js").configure_model()
