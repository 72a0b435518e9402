"""Settings that errors name in Python, in the form of a file and of flags."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

import pytest
import yaml

from lightning_realloc import GRPO, PPO, PromptDataModule
from lightning_realloc.commands.file_forms import file_form, flag_of, unnamed_class
from lightning_realloc.setting_hints import ALGORITHM_HINTS, DATA_HINTS, POLICY_LOSS_NAMES, STRATEGY_HINTS, VERL_HINTS

CLIP = "GRPO has no setting epsilon; here it is policy_loss=Clip(low=..., high=...)"


@pytest.mark.parametrize(
    ("message", "form"),
    [
        (CLIP, "policy_loss: {class_path: Clip, init_args: {low: ..., high: ...}}"),
        ("x; write a value such as Clip(high=0.28)", "policy_loss: {class_path: Clip, init_args: {high: 0.28}}"),
        ("x; here it is sampling=SamplingParams(n=...)", "sampling: {n: ...}"),
        ("x; use Speculation(num_draft_tokens=4)", "speculation: {num_draft_tokens: 4}"),
        ("x; here it is kl=KL(0.05, place='loss')", "kl: {coef: 0.05, place: loss}"),
        (
            "x; engine='vllm', generation=GenerationOptions(vllm=VLLMOptions(sleep=True))",
            "generation: {vllm: {sleep: true}}",
        ),
        ("x; raise VLLMOptions(timeout_s=...)", "generation: {vllm: {timeout_s: ...}}"),
        ("x; here it is Lightning's Trainer(devices=...)", "trainer: {devices: ...}"),
        (
            "x; set ReallocStrategy(max_staleness=0)",
            "trainer: {strategy: {class_path: ReallocStrategy, init_args: {max_staleness: 0}}}",
        ),
        ("x; add the callback EMA(), and train", "trainer: {callbacks: [{class_path: EMA}]}"),
        (
            "x; optimizer=partial(torch.optim.AdamW, lr=1e-05, betas=...)",
            "optimizer: {class_path: torch.optim.AdamW, init_args: {lr: 1.0e-05, betas: ...}}",
        ),
        (
            "x; Shaped(function, low=..., high=...) as a reward",
            "reward: {class_path: lightning_realloc.rewards.Shaped, init_args: {function: ..., low: ..., high: ...}}",
        ),
        ("x; sync_ref: Role(average_of='actor') in an algorithm of your own", None),  # only in Python
        ("x; peft_config=LoraConfig(r=8), speculation=Speculation(...)", None),
        ("policy_loss=Vespo(k_positive=2.0) weighs responses; set ratio_level='token'", None),  # is not the advice
        ("x; use an (unbalanced Clip(", None),
        ("x; correct it, or give functools.partial(...) with the arguments that it needs", None),
        ("x; optimizer=partial()", None),
    ],
)
def test_a_file_gets_a_mapping_or_a_class_path(message: str, form: str | None) -> None:
    assert file_form(message, ["fit", "--config", "x.yaml"]) == ("" if form is None else f"; in YAML: {form}")


@pytest.mark.parametrize(
    ("message", "form"),
    [
        (CLIP, "--model.policy_loss '{class_path: Clip, init_args: {low: ..., high: ...}}'"),
        ("epsilon; sampling=SamplingParams(n=8, top_p=...)", "--model.sampling.n 8 --model.sampling.top_p ..."),
        ("epsilon; here it is Trainer(devices=...)", "--trainer.devices ..."),
        ("epsilon; add EMA(decay=...)", "--trainer.callbacks+ '{class_path: EMA, init_args: {decay: ...}}'"),
        ("epsilon; give DatasetSource('gsm8k', split=...)", "--data.data.path gsm8k --data.data.split ..."),
    ],
)  # fmt: skip
def test_who_gave_a_flag_gets_flags(message: str, form: str) -> None:
    for flag in ("--epsilon", "--model.epsilon=0.2"):
        assert file_form(message, ["grpo", flag, "0.2"]) == f"; as a flag: {form}"


def test_several_values_are_named_once_each() -> None:
    twice = "x; policy_loss=Clip(high=...) or Cispo(high=...), that is policy_loss=Clip(high=...)"
    forms = [f"policy_loss: {{class_path: {name}, init_args: {{high: ...}}}}" for name in ("Clip", "Cispo")]
    assert file_form(twice, []) == f"; in YAML: {'; '.join(forms)}"


def class_paths(value: object) -> Iterator[str]:
    """Yield the class paths of a file's value."""
    if isinstance(value, dict):
        if "class_path" in value:
            yield value["class_path"]
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from class_paths(each)


def test_forms_of_all_hints_can_be_read() -> None:
    hints = {*ALGORITHM_HINTS.values(), *DATA_HINTS.values(), *STRATEGY_HINTS.values(), *VERL_HINTS.values()}
    hints |= {*POLICY_LOSS_NAMES.values()}
    found = 0
    for hint in hints:
        form = file_form(f"x; here it is {hint}", [])
        if not form:
            continue
        for each in form.removeprefix("; in YAML: ").split("; "):
            value = yaml.safe_load(each.replace("...", "1"))
            assert isinstance(value, dict) and len(value) == 1, hint
            assert all(path.rpartition(".")[2] in hint for path in class_paths(value)), hint
            found += 1
        flags = file_form(f"x; here it is {hint}", ["--x"]).removeprefix("; as a flag: ")
        assert all(word.startswith("--") for each in flags.split("; ") for word in shlex.split(each)[::2]), hint
    assert found > 80


@pytest.mark.parametrize(
    ("algorithm", "name", "flag"),
    [
        (GRPO, "kl_coef", "--model.kl_coef"),
        (GRPO, "max_cache_bytes", "--model.generation.max_cache_bytes"),
        (GRPO, "max_staleness", "--trainer.strategy ReallocStrategy --trainer.strategy.max_staleness"),
        (PPO, "gae_lambda", "--model.advantages.gae_lambda"),
        (GRPO, "gae_lambda", None),
        (GRPO, "max_prompt_tokens", "--data.max_prompt_tokens"),
        (GRPO, "devices", "--trainer.devices"),
        (GRPO, "timeout_s", "--model.generation.vllm.timeout_s"),
        (GRPO, "nothing", None),
    ],
)
def test_a_setting_has_the_flag_of_its_class_or_group(algorithm: type, name: str, flag: str | None) -> None:
    assert flag_of(algorithm, PromptDataModule, name) == flag


@pytest.mark.parametrize(
    ("path", "given", "hint"),
    [
        ("lightning_realloc.PolicyLoss", "{'low': 0.2}",
         "(Clip, Cispo, Sapo, Vespo), as in {class_path: Clip, init_args: {low: 0.2}}"),
        ("lightning_realloc.PolicyLoss", "NestedArg(key='negative', val='1.5')", "{class_path: Sapo, init_args: {neg"),
        ("lightning_realloc.PolicyLoss", "{}", "as in {class_path: Clip, init_args: {}}"),
        ("lightning_realloc.PolicyLoss", "{'nothing': 1}", "as in {class_path: Clip, init_args: ...}"),
        ("torch.optim.Optimizer", "'lr': ...", "(AdamW, "),
        ("lightning.Callback", "'dirpath': ...", "(ModelCheckpoint, "),
    ],
)  # fmt: skip
def test_settings_without_a_class_are_answered_with_classes_that_have_them(path: str, given: str, hint: str) -> None:
    assert hint in unnamed_class(path, given)


def test_a_class_that_may_be_left_out_is_not_asked_for() -> None:
    assert unnamed_class("torch.nn.Module", "{'a': 1}") == ""
