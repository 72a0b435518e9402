"""Conversation with a model on the generation engine: load the model, render messages, stream answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase, TextStreamer

from lightning_realloc.algorithms.base.role import Role
from lightning_realloc.batch.model_input import ModelInput
from lightning_realloc.commands.chat_tools import ChatTools, ToolSettings
from lightning_realloc.commands.parsing import has_bf16, refuse_gguf
from lightning_realloc.data.chat import Message, Text, conversation_text, prompt_token_ids
from lightning_realloc.data.images.image_files import ImageFile
from lightning_realloc.data.images.row_images import with_images
from lightning_realloc.data.images.sample_images import ImageProcessor, shown_input
from lightning_realloc.data.tokenizers import load_tokenizer
from lightning_realloc.errors import CheckpointError, ConfigError
from lightning_realloc.generation import Completion, GenerationEngine, SamplingParams
from lightning_realloc.generation.core.model_config import eos_ids_of
from lightning_realloc.remote_path import expand_home, is_path
from lightning_realloc.strategies.checkpoints.adapter_files import ADAPTER_CONFIG_FILE, CONFIG_FILE
from lightning_realloc.strategies.checkpoints.checkpoint_files import ROLES_FILE

MODEL_FOLDER = "model"
"""Folder of the trained model inside the output of a one-line run."""
_PLACE = "the conversation"


class ChatSession:
    """Messages so far, and the engine that answers them.

    Args:
        engine: Engine on the model.
        tokenizer: The model's tokenizer.
        stream: Receives the tokens of an answer.
        params: Sampling of the answers.
        system: System message; None: none.
        device: Name of the model's device.
        tools: Tools that answers may call; None: none.
    """

    def __init__(
        self,
        engine: GenerationEngine,
        tokenizer: Any,
        stream: TokenStream,
        params: SamplingParams,
        *,
        system: str | None = None,
        device: str = "cpu",
        tools: ChatTools | None = None,
    ) -> None:
        self.has_template = tokenizer.chat_template is not None
        self.device = device
        self._engine, self._tokenizer, self._stream, self._params = engine, tokenizer, stream, params
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self._tools = tools
        self._images: ImageProcessor | None = None
        """The model's processor, once a question shows an image."""
        self._num_turns = 0
        self.reset()

    @classmethod
    def load(
        cls,
        folder: str,
        params: SamplingParams,
        write: Callable[[str], object],
        *,
        system: str | None = None,
        device: str | None = None,
        stops: Sequence[str] = (),
        tool_settings: ToolSettings | None = None,
    ) -> Self:
        """Load a model and its tokenizer.

        Args:
            folder: Folder of a model, of adapters, or of a run that wrote one of them; or a Hugging Face name.
            params: Sampling of the answers.
            write: Receives the text of answers as it is generated.
            system: System message.
            device: Device of the model; None: the first GPU, else the CPU.
            stops: Special tokens and other texts that end a turn, besides the model's own.
            tool_settings: Tools that answers may call, and how; None: none.

        Raises:
            CheckpointError: for a checkpoint, which has to be exported first.
            ConfigError: for a folder without a model or a tokenizer, for a system message without a chat template, and
                for a model that cannot use tools.
        """
        source, adapters, tokenizer_source = model_sources(model_folder(folder))
        chosen = _device(device)
        tokenizer: Any = load_tokenizer(tokenizer_source)
        if system is not None and tokenizer.chat_template is None:
            raise ConfigError("--system needs a chat template, and this tokenizer has none; leave it out")
        if tool_settings is not None and tokenizer.chat_template is None:
            raise ConfigError("--tools needs a chat template, and this tokenizer has none; leave it out")
        added = tokenizer.added_tokens_encoder
        stop_ids = tuple(added[text] for text in stops if text in added)
        stop_strings = tuple(text for text in stops if text not in added)
        params = replace(params, stop_token_ids=stop_ids, stop_strings=stop_strings)
        model = load_model(source, adapters, chosen)
        tools = None
        if tool_settings is not None:
            all_stops = eos_ids_of(model) | ({tokenizer.eos_token_id} - {None}) | set(stop_ids)
            tools = ChatTools(tokenizer, tool_settings, write, stop_token_ids=all_stops)
        stream = TokenStream(tokenizer, write)
        engine = GenerationEngine(model, tokenizer=tokenizer, max_slots=1)
        return cls(engine, tokenizer, stream, params, system=system, device=str(chosen), tools=tools)

    def reset(self) -> None:
        """Forget all messages but the system message."""
        self.messages: list[Message] = list(self._system)

    def check_images(self, images: Sequence[str]) -> None:
        """Raise the error of a question about these files, if they cannot be shown; see :meth:`ask`."""
        if not images:
            return
        if self._processor() is None:
            raise ConfigError("images need the folder of a model that reads them")
        for name in images:
            ImageFile.read(name, _PLACE).open()

    def ask(self, question: str, images: Sequence[str] = ()) -> str:
        """Return the answer to a question, and stream it; both become part of the conversation, with calls of tools.

        Args:
            images: Files of images that the question is about.

        Raises:
            ConfigError: for images and a model that reads text alone.
            DataError: for a conversation that the chat template cannot render, and for images that cannot be used.
            GenerationError: for a conversation that does not fit the model's context.
        """
        self.check_images(images)
        messages = [*self.messages, self._question(question, images)]
        if self._tools is None:
            answer = self._tokenizer.decode(
                list(self._turn(self._prompt(messages)).token_ids), skip_special_tokens=True
            )
            turns: list[Message] = [{"role": "assistant", "content": str(answer)}]
        else:
            turns = self._tools.turns(messages, self._turn, self._processor)
        if self.has_template:
            self.messages = [*messages, *turns]
        return str(turns[-1]["content"])

    def _processor(self) -> ImageProcessor | None:
        """Return the model's processor of images, loaded when the first one is shown; None for a model of text."""
        if self._images is None:
            self._images = ImageProcessor.load(self._tokenizer.name_or_path, {})
        return self._images

    def _question(self, text: str, images: Sequence[str]) -> Message:
        """Return a question as a message, with its images read."""
        if not images:
            return {"role": "user", "content": text}
        processor = self._processor()
        assert processor is not None, "images are checked first"
        shown = [{"type": "image", "image": name} for name in images]
        row = {"prompt": [{"role": "user", "content": [*shown, {"type": "text", "text": text}]}]}
        message: Message = with_images(row, ["prompt"], _PLACE, processor)["prompt"][0]
        return message

    def _turn(self, prompt: ModelInput) -> Completion:
        """Generate one turn of the model, and stream it."""
        sample_id, self._num_turns = self._num_turns, self._num_turns + 1  # other random numbers for each turn
        self._stream.begin()
        show = self._stream.show
        (completion,) = self._engine.generate([prompt], self._params, sample_ids=[sample_id], on_tokens=show)
        self._stream.end()
        return completion

    def _prompt(self, messages: list[Message]) -> ModelInput:
        if not self.has_template:
            text = Text(messages[-1]["content"], "the question", add_bos=True)
            return ModelInput(tuple(prompt_token_ids(self._tokenizer, [text])[0]))
        text = conversation_text(self._tokenizer, messages, _PLACE, add_generation_prompt=True)
        return shown_input(prompt_token_ids(self._tokenizer, [text])[0], messages, self._processor)


class TokenStream(TextStreamer):
    """Writes an answer in whole words while it is generated.

    Args:
        tokenizer: Decodes the tokens.
        write: Receives text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, write: Callable[[str], object]) -> None:
        super().__init__(tokenizer, skip_special_tokens=True)
        self._write = write

    def begin(self) -> None:
        """Start with an empty answer, also after one that was interrupted."""
        self.token_cache, self.print_len = [], 0

    def show(self, sample_id: int, token_ids: Sequence[int]) -> None:
        """Take new tokens, and write the words that they end."""
        self.put(torch.tensor(token_ids))

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Write text, and a line break at the end."""
        if stream_end or text:
            self._write(text + ("\n" if stream_end else ""))


def model_folder(given: str) -> str:
    """Return the folder of a model or of adapters, inside a run's folder if need be; a hub name as it is.

    Raises:
        CheckpointError: for a checkpoint, which has to be exported first.
        ConfigError: for a folder that does not exist or holds no model.
    """
    refuse_gguf(given)
    path = expand_home(Path(given))
    if not path.exists():
        if is_path(given):
            raise ConfigError(f"there is no folder {given!r} in {Path.cwd()}; give the folder of a model")
        return given
    if (path / ROLES_FILE).is_file():
        raise CheckpointError(
            f"{given!r} is a checkpoint of a run; write its model as a folder first: lightning-realloc export {given} "
            f"--output FOLDER, then lightning-realloc chat FOLDER"
        )
    for folder in (path, path / MODEL_FOLDER):
        if any((folder / name).is_file() for name in (CONFIG_FILE, ADAPTER_CONFIG_FILE)):
            return str(folder)
    last = _last_checkpoint(path)
    found = "that of a checkpoint" if last is None else f"that of a checkpoint: lightning-realloc export {last}"
    raise ConfigError(
        f"{given!r} holds neither {CONFIG_FILE} nor {ADAPTER_CONFIG_FILE}; a run writes its model at the end of "
        f"training, and lightning-realloc export writes {found}" + (" --output FOLDER" if last is not None else "")
    )


def _last_checkpoint(folder: Path) -> Path | None:
    """Return the newest checkpoint in a folder, or in that of a run's checkpoints; None without one."""
    names = [name for each in (folder, folder / "checkpoints") for name in each.glob("*.ckpt")]
    found = [name for name in names if (name / ROLES_FILE).is_file()]
    return max(found, key=lambda name: (name.stat().st_mtime, name.name), default=None)


def load_model(source: str, adapters: str | None, device: torch.device) -> nn.Module:
    """Return a causal language model for inference, with adapters merged. Raises ConfigError if it cannot be loaded."""
    role = Role(name="model" if adapters is None else "base", source=source, trained=False, peft=adapters)
    model = role.build(seed=0).eval()
    dtype = torch.bfloat16 if device.type == "cuda" and has_bf16() else torch.float32
    return model.to(device, dtype)


def model_sources(given: str) -> tuple[str, str | None, str]:
    """Return the sources of the model, of its adapters (None without) and of its tokenizer."""
    folder = Path(given)
    if not (folder / ADAPTER_CONFIG_FILE).is_file():
        return given, None, given
    base = _base_of(folder)
    return base, given, given if (folder / "tokenizer_config.json").is_file() else base


def _base_of(adapters: Path) -> str:
    """Return the base model that a folder of adapters names."""
    try:
        settings: Any = json.loads((adapters / ADAPTER_CONFIG_FILE).read_text(encoding="utf-8"))
        base = settings["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{adapters / ADAPTER_CONFIG_FILE} cannot be read ({error}); write it again") from error
    if not base:
        raise ConfigError(
            f"{adapters / ADAPTER_CONFIG_FILE} names no base model; set its base_model_name_or_path, or merge them: "
            f"lightning-realloc export CHECKPOINT --merge --base NAME --output FOLDER"
        )
    return str(base)


def _device(name: str | None) -> torch.device:
    try:
        chosen = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError as error:
        raise ConfigError(f"--device={name} is no device; give cpu, cuda or cuda:1") from error
    if chosen.type == "cuda" and not (torch.cuda.is_available() and (chosen.index or 0) < torch.cuda.device_count()):
        raise ConfigError(f"--device={name}: there are {torch.cuda.device_count()} CUDA devices; give cpu or another")
    return chosen
