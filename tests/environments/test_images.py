"""Environments and tools that answer with images: tokens, pixels and log-probabilities are those of transformers."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import replace
from io import BytesIO
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor
from transformers import ProcessorMixin

from lightning_realloc import Conversation, MessageEnvironment, PromptDataModule, SamplingParams, StepResult
from lightning_realloc.algorithms.base.rollout_columns import judged_responses, rollout_of
from lightning_realloc.algorithms.rollout.conversations.dialogues import EpisodeDialogue
from lightning_realloc.batch.model_input import joined_inputs
from lightning_realloc.batch.packing import pack
from lightning_realloc.batch.samples import Samples, answer_inputs, model_inputs
from lightning_realloc.data.images.image_files import ImageFile
from lightning_realloc.data.images.sample_images import ImageProcessor
from lightning_realloc.environments import ToolEnvironment
from lightning_realloc.environments.environment_factory import EnvironmentFactory
from lightning_realloc.environments.episode_options import EpisodeOptions
from lightning_realloc.environments.episodes import Episodes
from lightning_realloc.environments.turns.turn_parser import TurnParser
from lightning_realloc.generation import Completion, GenerationEngine
from lightning_realloc.rewards import RewardFunctions
from lightning_realloc.runtime.messages.plain_data import decode_value, encode_value
from lightning_realloc.runtime.parallel.packed_forward import token_logprobs
from tests.data.images.test_rows import drawn, table, user
from tests.environments.some_tools import call, turn
from tests.environments.test_tool_environment import run, tool
from tests.vision_models import forward_arguments, tiny_vision_model
from tests.vision_processors import PROCESSED_FAMILIES, tiny_processor

SHOWN = {"type": "image"}
ROWS: list[dict[str, Any]] = [{"prompt": user("a?"), "images": []}, {"prompt": user(SHOWN, "b?"), "images": [drawn(3)]}]
EOS = 2
FAMILIES = [family for family in PROCESSED_FAMILIES if family != "llava_onevision"]


class Drawing(MessageEnvironment):
    """Shows one image after the first turn, two after the second, and none after the third."""

    shown: Sequence[Sequence[Any]] = ((drawn(1),), (drawn(2), drawn(0)), (), ())

    def reset(self, row: Mapping[str, Any]) -> None:
        """Begin with the first images."""
        self.number = 0

    def step(self, message: Mapping[str, Any]) -> StepResult:
        """Show the next images."""
        images = self.shown[self.number]
        self.number += 1
        return StepResult(user(*[SHOWN] * len(images), "go"), images=images)


def play(
    family: str, environment: Any, functions: RewardFunctions | None = None, *, text_model: bool = False
) -> tuple[Samples, list[Completion]]:
    """Return two conversations for each row with a tiny model, as training gets them, and as the engine made them."""
    processor = tiny_processor(family)
    rows = table(PromptDataModule(ROWS, batch_size=1, tokenizer=processor))
    tokenizer: Any = processor.tokenizer  # type: ignore[attr-defined]
    options = EpisodeOptions(
        EnvironmentFactory(environment), tokenizer, frozenset({EOS}), {}, TurnParser(tokenizer),
        Conversation(max_turns=4, max_turn_tokens=5),
        find_processor=lambda: None if text_model else ImageProcessor(processor),
    )  # fmt: skip
    engine = GenerationEngine(tiny_vision_model(family, max_position_embeddings=512), tokenizer=tokenizer)
    dialogue = EpisodeDialogue(Episodes(options), options.bounds, engine, functions)
    sampling = SamplingParams(max_new_tokens=400, n=2, seed=5)
    samples = rows.with_columns(prompt_id=rows.ids).repeat(2)
    inputs, params = dialogue.begin(rows, samples, sampling)
    made = engine.generate(inputs, params, sample_ids=samples.ids.tolist(), **dialogue.settings)
    return rollout_of(samples, made, dialogue).with_columns(**samples.data), made


def processed(family: str, rollout: Samples, row: int) -> tuple[list[int], dict[str, Tensor]]:
    """Return tokens and further inputs that the processor makes of a whole conversation with the model's turns."""
    processor: Any = tiny_processor(family)
    response, mask = rollout.ragged("response_ids").to_lists()[row], rollout.ragged("model_mask").to_lists()[row]
    messages, images, turns, at = [*ROWS[row // 2]["prompt"]], [*ROWS[row // 2]["images"]], [], 0
    for chosen, run_of in groupby(mask):
        length = len(list(run_of))
        if chosen:
            turns.append(response[at : at + length])
            messages.append({"role": "assistant", "content": [{"type": "text", "text": "~"}]})
        else:
            shown = Drawing.shown[len(turns) - 1]
            messages += user(*[SHOWN] * len(shown), "go")
            images += shown
        at += length
    text = ProcessorMixin.apply_chat_template(processor, messages, tokenize=False, processor_kwargs={})
    whole = processor(text=[text], images=[images] if images else None, return_tensors="pt")
    parts: list[list[int]] = [[]]
    for token in whole["input_ids"][0].tolist():
        if token == processor.tokenizer.convert_tokens_to_ids("~"):
            parts.append([])
        else:
            parts[-1].append(token)
    ids = parts[0]
    for own, after in zip(turns, parts[1:], strict=True):
        ids += [*own, *(after[1:] if own[-1] == EOS else after)]
    given = {name: values for name, values in whole.items() if name.startswith(("pixel", "image_"))}
    return ids[: len(rollout.ragged("prompt_ids").to_lists()[row]) + len(response)], given


def check_against_transformers(family: str, model: Any, rollout: Samples) -> None:
    """Assert that tokens and pixels are the processor's, and log-probabilities those of transformers' forward."""
    packed = pack(rollout, columns=("behaviour_logprobs",), share_prompts=True)
    found = packed.responses(token_logprobs(model, packed, only_responses=True).logprobs).split()
    for row, (prompt, answers) in enumerate(zip(model_inputs(rollout), answer_inputs(rollout), strict=True)):
        ids, given = processed(family, rollout, row)
        response = rollout.ragged("response_ids").to_lists()[row]
        assert [*prompt.token_ids, *response] == ids
        extras = joined_inputs([prompt.extras, *(answer.input.extras for answer in answers)])
        for name, values in extras.items():
            torch.testing.assert_close(values.reshape(given[name].shape), given[name], atol=0, rtol=0)
        logprobs = model(**forward_arguments(family, ids, extras), use_cache=False).logits[0, :-1].log_softmax(-1)
        expected = logprobs.gather(1, torch.tensor(ids)[1:, None])[len(prompt.token_ids) - 1 :, 0]
        mask = rollout.ragged("model_mask").split()[row]
        torch.testing.assert_close(found[row][mask], expected[mask], atol=2e-5, rtol=1e-5)
        behaviour = rollout.ragged("behaviour_logprobs").split()[row]
        torch.testing.assert_close(behaviour[mask], expected[mask], atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_conversations_with_images_are_what_the_processor_makes_of_them_at_once(family: str) -> None:
    model = tiny_vision_model(family, max_position_embeddings=512)
    rollout, _ = play(family, Drawing)

    assert sum(map(len, answer_inputs(rollout))) == 8, "two answers of each conversation show images"
    check_against_transformers(family, model, rollout)


class Showing(Drawing):
    """Begins with an image of its own after those of the row."""

    def reset(self, row: Mapping[str, Any]) -> list[Any]:
        """Add the image to the row's question."""
        super().reset(row)
        return [*row["prompt"], *user({**SHOWN, "image": drawn(4)}, "look")]


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl", "gemma3"])
@torch.no_grad()
def test_a_reset_may_show_images(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_vision_model(family, max_position_embeddings=512)
    rollout, made = play(family, Showing)
    changed = [{"prompt": [*row["prompt"], *user(SHOWN, "look")], "images": [*row["images"], drawn(4)]} for row in ROWS]
    monkeypatch.setattr("tests.environments.test_images.ROWS", changed)

    assert [one.answers != () and one.finish_reason != "failure" for one in made] == [True] * 4
    check_against_transformers(family, model, rollout)


class Looking:
    """Object with TRL's contract whose ``reset`` shows an image after the row's question."""

    def reset(self, **columns: Any) -> list[Any]:
        """Show it, with a text."""
        return [{**SHOWN, "image": drawn(4)}, {"type": "text", "text": "look"}]

    def get_reward(self) -> float:
        """Reward nothing."""
        return 0.0


@torch.no_grad()
def test_a_reset_with_trls_contract_may_show_images() -> None:
    def begun(environment: Any) -> list[Any]:
        rollout, made = play("llava", environment)
        assert "failure" not in [one.finish_reason for one in made]
        return [(one.token_ids, one.extras["pixel_values"]) for one in model_inputs(rollout)]

    class Same(Drawing):
        def reset(self, row: Mapping[str, Any]) -> list[Any]:
            super().reset(row)
            *first, last = row["prompt"]
            parts = (
                last["content"] if isinstance(last["content"], list) else [{"type": "text", "text": last["content"]}]
            )
            return [*first, {**last, "content": [*parts, *Looking().reset()]}]

    for (ids, pixels), (expected_ids, expected) in zip(begun(Looking), begun(Same), strict=True):
        assert ids == expected_ids and torch.equal(pixels, expected)
        assert len(pixels) > 0


class Ending(Showing):
    """Ends with the second turn, in front of two images."""

    def step(self, message: Mapping[str, Any]) -> StepResult:
        """End with the second step."""
        return replace(super().step(message), done=self.number == 2)


def shown_in(messages: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Return the images in the parts of messages."""
    parts = [part for message in messages if isinstance(message["content"], list) for part in message["content"]]
    return [part["image"] for part in parts if part["type"] == "image"]


def test_rewards_read_images_of_answers_as_images_of_pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[list[Any], list[Any]]] = []

    def beside(prompts: list[Any], completions: list[Any], environments: list[Any]) -> list[float]:
        seen.extend((shown_in(prompt), shown_in(talk)) for prompt, talk in zip(prompts, completions, strict=True))
        return [1.0] * len(prompts)

    def elsewhere(prompts: list[Any], completions: list[Any]) -> list[float]:
        return beside(prompts, completions, [])

    functions = RewardFunctions([beside, elsewhere])
    processor: Any = tiny_processor("llava")
    rollout, _ = play("llava", Ending, functions)
    opened: list[int] = []
    open_image = ImageFile.open
    monkeypatch.setattr(ImageFile, "open", lambda file: opened.append(file.key) or open_image(file))

    rewards = judged_responses(functions, rollout.select([2, 0, 3, 1]), processor.tokenizer)

    functions.close()
    assert rewards.total.tolist() == [2.0] * 4
    sent = pickle.loads(pickle.dumps(seen))
    assert opened == [], "neither here nor for other processes"
    expected = [([drawn(4)], [drawn(1), drawn(2), drawn(0)]), ([drawn(3), drawn(4)], [drawn(1), drawn(2), drawn(0)])]
    for (of_prompt, answered), received, row in zip(seen, sent, [0, 0, 1, 1, 1, 0, 1, 0], strict=True):
        assert all(isinstance(image, Image.Image) for image in (*of_prompt, *answered))
        assert (of_prompt, answered) == expected[row] == received
    answered[0].thumbnail((4, 4))
    assert pickle.loads(pickle.dumps(answered))[0].size == (4, 2), "what a function changed"


def test_answers_with_images_travel_between_ranks_as_bytes(tmp_path: Path) -> None:
    drawn(1).save(tmp_path / "one.png")
    stream = BytesIO()
    drawn(2).save(stream, "PNG")

    class Files(Drawing):
        shown = ((tmp_path / "one.png",), (stream.getvalue(), drawn(0)), (), ())

    rollout, made = play("qwen2_5_vl", Files)

    (tmp_path / "one.png").unlink()
    for ours, theirs in zip(made, decode_value(encode_value(made)), strict=True):
        assert theirs == ours
        for one, other in zip(ours.answers, theirs.answers, strict=True):
            assert one.input.extras.keys() == other.input.extras.keys()
            assert all(torch.equal(values, other.input.extras[name]) for name, values in one.input.extras.items())
    whole = pack(rollout)
    expected, _ = play("qwen2_5_vl", Drawing)
    assert torch.equal(whole.extras["pixel_values"], pack(expected).extras["pixel_values"])


@pytest.mark.parametrize(
    ("shown", "error"),
    [
        ((b"no image",), r"\.step after turn 1 of sample 0: .*not an image"),
        (("none.png",), r"\.step after turn 1 of sample 0: there is no image 'none\.png'"),
        (
            (Image.new("RGB", (400, 1)),),
            r"\.step after turn 1 of sample 0: the model's processor refuses images of 400 x 1",
        ),
    ],
)
def test_a_bad_image_fails_its_conversation_alone(shown: tuple[Any, ...], error: str) -> None:
    class Bad(Drawing):
        def step(self, message: Mapping[str, Any]) -> StepResult:
            return StepResult(user("go"), images=shown) if self.is_bad else super().step(message)

        def reset(self, row: Mapping[str, Any]) -> None:
            super().reset(row)
            self.is_bad = not row["images"]

    _, made = play("qwen2_5_vl", Bad)

    assert [one.finish_reason == "failure" for one in made] == [True, True, False, False]
    with pytest.raises(AssertionError, match=error):
        raise AssertionError(made[0].error)


def test_a_model_of_text_fails_conversations_that_show_images() -> None:
    _, made = play("llava", Drawing, text_model=True)

    assert all("shows images, and the model reads text alone" in str(one.error) for one in made)


def test_tools_return_images_and_parts() -> None:
    image, address = drawn(0), {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    results: dict[str, Any] = {"one": image, "several": ["before", image, {"a": 1}, address], "words": ["a", "b"]}
    environment = ToolEnvironment([tool(name, lambda found=found: found) for name, found in results.items()])

    answered = run(environment.step(turn(*(call(name, {}) for name in results))))

    one, several, words = (message["content"] for message in answered.messages)
    assert one == [{"type": "image", "image": image}]
    assert several == [
        {"type": "text", "text": "before"}, {"type": "image", "image": image}, {"type": "text", "text": '{"a": 1}'},
        address,
    ]  # fmt: skip
    assert words == '["a", "b"]' and answered.shows_images


def test_images_without_parts_come_before_the_first_text() -> None:
    image = drawn(0)
    assert StepResult(images=[image]).shown_messages == user({"type": "image", "image": image})
    (first, second) = StepResult([*user("a"), *user("b")], images=[image, image]).shown_messages
    assert [part["type"] for part in first["content"]] == ["image", "image", "text"] and second == user("b")[0]
