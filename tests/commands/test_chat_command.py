"""Conversations of ``lightning-realloc chat``, with tiny models in this process."""

from __future__ import annotations

import io
import json
import os
import re
from pathlib import Path

import pytest

from lightning_realloc.commands.chat_command import run_chat
from lightning_realloc.commands.chat_session import ChatSession, TokenStream, load_model, model_folder
from lightning_realloc.errors import CheckpointError, ConfigError, DataError, GenerationError, ReallocError
from lightning_realloc.generation import SamplingParams
from tests.data.images.test_image_files import damaged
from tests.models import byte_tokenizer, tiny_model
from tests.vision_models import tiny_vision_model
from tests.vision_processors import tiny_processor

TEMPLATE = "{% for message in messages %}{{ message['role'][0] + ':' + message['content'] + '\n' }}{% endfor %}"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder with a model, and a model without chat template."""
    path = tmp_path_factory.mktemp("run")
    model, tokenizer = tiny_model("qwen2", vocab_size=260), byte_tokenizer()
    for name in ("plain", "model"):
        model.save_pretrained(path / name)
        tokenizer.save_pretrained(path / name)
        tokenizer.chat_template = TEMPLATE
    return path


def _chat(folder: Path, *flags: str, typed: str = "", terminal: bool = False) -> str:
    output = io.StringIO()
    stdin = Terminal(typed) if terminal else io.StringIO(typed)
    run_chat([str(folder), "--device", "cpu", "--max-new-tokens", "12", *flags], write=output.write, stdin=stdin)
    return output.getvalue()


def test_streamed_text_is_the_answer_and_arrives_in_pieces(folder: Path) -> None:
    pieces: list[str] = []
    params = SamplingParams(max_new_tokens=60, ignore_eos=True)
    session = ChatSession.load(str(folder), params, pieces.append, device="cpu")
    answer = session.ask("Hello")
    assert "".join(pieces) == f"{answer}\n"
    assert session.messages == [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": answer}]


def test_words_are_written_while_tokens_come() -> None:
    tokenizer, pieces = byte_tokenizer(), []
    stream = TokenStream(tokenizer, pieces.append)
    stream.begin()
    for token in tokenizer("one two\nthree", add_special_tokens=False)["input_ids"]:
        stream.show(0, [token])
    assert pieces == ["one ", "two\n"]
    stream.end()
    assert pieces == ["one ", "two\n", "three\n"]


def test_answers_depend_on_the_conversation_and_reset_forgets_it(folder: Path) -> None:
    params = SamplingParams(max_new_tokens=12, temperature=0.0)
    session = ChatSession.load(str(folder), params, lambda text: None, system="Be brief.", device="cpu")
    first = session.ask("Hello")
    session.ask("And?")
    assert [message["role"] for message in session.messages] == ["system", *["user", "assistant"] * 2]
    session.reset()
    assert [message["role"] for message in session.messages] == ["system"]
    assert session.ask("Hello") == first  # the most likely tokens after the same messages


def test_a_conversation_that_is_too_long_is_refused_and_not_kept(folder: Path) -> None:
    session = ChatSession.load(str(folder), SamplingParams(), lambda text: None, device="cpu")
    with pytest.raises(GenerationError, match="leaves no room"):
        session.ask("x" * 500)
    assert session.messages == []


def test_one_question_comes_from_a_flag_or_from_a_pipe(folder: Path) -> None:
    asked = _chat(folder, "--prompt", "Hello", "--temperature", "0")
    assert asked and asked == _chat(folder, "--temperature", "0", typed="Hello\n")
    line = "x" * 80
    assert _chat(folder, typed=f"{line}\n")
    with pytest.raises(GenerationError, match="leaves no room"):  # both lines are one question
        _chat(folder, typed=f"{line}\n{line}\n")
    with pytest.raises(ConfigError, match="the question is empty"):
        _chat(folder, typed=" \n")


def test_turns_end_at_texts_and_tokens_that_a_flag_names(folder: Path) -> None:
    greedy = ("--prompt", "Hello", "--temperature", "0")
    whole = _chat(folder / "model", *greedy)
    letter = whole[4]
    stopped = _chat(folder / "model", *greedy, "--stop", "absent", "--stop", letter)
    assert stopped == whole[: whole.index(letter) + 1] + "\n"
    session = ChatSession.load(str(folder), SamplingParams(), print, device="cpu", stops=["<bos>", "stop"])
    assert (session._params.stop_token_ids, session._params.stop_strings) == ((1,), ("stop",))


def test_a_terminal_talks_until_the_user_quits(folder: Path) -> None:
    said = _chat(folder, typed="Hello\n\n/reset\n/help\n" + "x" * 500 + "\n/quit\nnever read\n", terminal=True)
    assert said.startswith(f"{folder} on cpu; /reset forgets the conversation, /image FILE shows one, /quit")
    assert "(the conversation is empty)" in said and "(/help is no command; " in said
    assert "leaves no room for a response" in said and said.endswith("/reset forgets the conversation)\n")


def test_images_wait_for_an_answer_and_bad_ones_are_refused_at_once(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    pytest.importorskip("PIL")
    from PIL import Image

    folder = tmp_path_factory.mktemp("vision")
    tiny_vision_model("llava", max_position_embeddings=128).save_pretrained(folder)
    tiny_processor("llava").save_pretrained(folder)
    ball, text, hurt = folder / "ball.png", folder / "text.png", folder / "hurt.png"
    Image.new("RGB", (16, 16), "red").save(ball)
    text.write_text("no image")
    hurt.write_bytes(damaged())
    waits = f"(the next question shows {ball})\n"
    typed = f"/image {text}\n/image {hurt}\n/image {ball}\n{'x' * 500}\nHi\nAnd?\n/image {ball}\n/reset\nHi\n"
    said = _chat(folder, typed=typed, terminal=True)
    assert f"{text} is not an image that Pillow reads; correct it; /reset" in said and said.count(waits) == 3
    assert re.search(rf"{hurt} is damaged inside its pixels \(.*\); correct it; /reset", said)
    assert said.index("leaves no room") < said.rindex(waits, 0, said.index("(the conversation is empty)"))
    session = ChatSession.load(str(folder), SamplingParams(max_new_tokens=4), lambda text: None, device="cpu")
    session.ask("Hi", [str(ball)])
    session.ask("And?")
    assert [isinstance(message["content"], list) for message in session.messages] == [True, False, False, False]
    with pytest.raises(DataError, match=r"there is no image 'none\.png' in .*; correct the path$"):
        _chat(folder, "--image", "none.png", typed="Hi\n", terminal=True)


def test_a_model_without_template_continues_each_text(folder: Path) -> None:
    assert "continues each text alone" in _chat(folder / "plain", typed="Hello\n", terminal=True)
    with pytest.raises(ConfigError, match="--system needs a chat template"):
        _chat(folder / "plain", "--system", "Be brief.", "--prompt", "Hello")


def test_adapters_are_merged_into_the_base_that_they_name(folder: Path, tmp_path: Path) -> None:
    import torch
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    adapted = get_peft_model(tiny_model("qwen2", vocab_size=260), config)
    adapted.peft_config["default"].base_model_name_or_path = str(folder / "plain")
    adapted.save_pretrained(tmp_path)
    model = load_model(str(folder / "plain"), str(tmp_path), torch.device("cpu"))
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        assert torch.allclose(model(ids).logits, adapted.eval()(ids).logits, atol=1e-4)


def test_a_folder_without_a_model_says_what_to_do(folder: Path, tmp_path: Path) -> None:
    assert model_folder(str(folder)) == str(folder / "model")
    assert model_folder(str(folder / "plain")) == str(folder / "plain")
    assert model_folder("org/name") == "org/name"
    with pytest.raises(ConfigError, match=r"holds neither config\.json nor adapter_config\.json"):
        model_folder(str(tmp_path))
    for number in (1, 2):
        checkpoint = tmp_path / "checkpoints" / f"step={number}.ckpt"
        checkpoint.mkdir(parents=True)
        (checkpoint / "realloc.json").write_text("{}")
        os.utime(checkpoint, (number, number))
    for place in (tmp_path, tmp_path / "checkpoints"):
        with pytest.raises(ConfigError, match=r"export .*step=2\.ckpt --output FOLDER"):
            model_folder(str(place))
    for missing in ("./nowhere", "runs/nowhere", "outputs/nowhere"):
        with pytest.raises(ConfigError, match=f"there is no folder '{missing}'"):
            run_chat([missing], io.StringIO().write, io.StringIO("Hello"))
    (tmp_path / "realloc.json").write_text("{}")
    with pytest.raises(CheckpointError, match="lightning-realloc export"):
        model_folder(str(tmp_path))
    (tmp_path / "bases").mkdir()
    (tmp_path / "bases" / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": None}))
    with pytest.raises(ConfigError, match="names no base model"):
        _chat(tmp_path / "bases", "--prompt", "Hello")
    (tmp_path / "gguf").mkdir()
    (tmp_path / "gguf" / "model-q4.gguf").write_text("")
    with pytest.raises(ConfigError, match="gguf_file="):
        model_folder(str(tmp_path / "gguf"))


@pytest.mark.parametrize("device", ["cuda:99", "toaster"])
def test_a_device_that_is_not_there_is_refused(folder: Path, device: str) -> None:
    with pytest.raises(ConfigError, match=f"--device={device}"):
        _chat(folder, "--device", device, "--prompt", "Hello")


@pytest.mark.parametrize(
    ("flags", "typed", "message"),
    [
        (("--prompt", " "), "", "the question is empty"),
        ((), " \n", "the question is empty"),
        (("--prompt", "Hello", "--system", "Be brief."), "", "--system needs a chat template"),
        (("--prompt", "Hello", "--temperature", "-1"), "", "temperature=-1"),
        (("--prompt", "Hello", "--device", "toaster"), "", "--device=toaster"),
    ],
)
def test_flags_are_checked_before_the_model_is_loaded(
    tmp_path: Path, flags: tuple[str, ...], typed: str, message: str
) -> None:
    byte_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{}")  # of no model: loading it would fail
    with pytest.raises(ReallocError, match=message):
        _chat(tmp_path, *flags, typed=typed)
