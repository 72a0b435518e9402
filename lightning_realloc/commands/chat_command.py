"""Command ``lightning-realloc chat``: talk to a trained model, with tokens shown as they are generated."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TextIO

from lightning_realloc.commands.agent_settings import TOOL_FORMS, tool_setting
from lightning_realloc.commands.chat_session import ChatSession, model_folder
from lightning_realloc.commands.chat_tools import ToolSettings
from lightning_realloc.commands.command_parser import CommandParser
from lightning_realloc.environments.tools.tool import tools_of
from lightning_realloc.errors import ConfigError, DataError, GenerationError
from lightning_realloc.generation import SamplingParams

_COMMANDS = "/reset forgets the conversation, /image FILE shows one, /quit ends it, Ctrl-C stops an answer"


def chat_parser() -> CommandParser:
    """Return the parser of ``lightning-realloc chat``."""
    parser = CommandParser("chat")
    add = parser.add_argument
    folder = "Folder of a model, of adapters or of a run, or a Hugging Face name."
    add("folder", nargs="?", metavar="FOLDER", help=folder)
    add("--system", metavar="TEXT", help="System message at the beginning of the conversation.")
    add(
        "--prompt",
        metavar="TEXT",
        help="One question. Without it, all lines of a pipe are one, and a terminal asks several.",
    )
    image = "Image that the first question is about; may be repeated. In a conversation: /image FILE."
    add("--image", action="append", default=[], metavar="FILE", help=image)
    tools = f"Tools that the model may call, one or several: {TOOL_FORMS}."
    add("--tools", nargs="+", action="extend", default=[], metavar="TOOLS", help=tools)
    turns = "Most turns of the model in an answer with tools. Default: 8."
    add("--max-turns", type=int, metavar="N", help=turns)
    add("--parser", metavar="FORMAT", help="Format of the model's calls, such as hermes. Default: by chat template.")
    add("--temperature", type=float, default=0.7, help="0 takes the most likely token. Default: %(default)s.")
    add("--max-new-tokens", type=int, default=512, metavar="N", help="Most tokens of a turn. Default: %(default)s.")
    stop = "Token or other text that ends a turn besides the model's own, such as '<|eom_id|>'; may be repeated."
    add("--stop", action="append", default=[], metavar="TEXT", help=stop)
    add("--seed", type=int, default=0, help="Seed of the sampling. Default: %(default)s.")
    add("--device", help="Device such as cpu or cuda:1. Default: the first GPU, else the CPU.")
    return parser


def run_chat(arguments: Sequence[str], write: Callable[[str], object], stdin: TextIO | None = None) -> int:
    """Run a command line and return its exit code.

    With ``--prompt``, or if ``stdin`` is no terminal, there is one question; the answer alone is written.

    Raises:
        ReallocError: for a wrong command line, a model that cannot be loaded, and a question that cannot be answered.
    """
    flags = _parse(arguments)
    stdin = stdin or sys.stdin
    if flags.prompt is None and stdin.isatty():
        session = _session(flags, write)
        session.check_images(flags.image)
        write(f"{_greeting(session, flags)}\n")
        _talk(session, stdin, write, flags.image)
        return 0
    model_folder(flags.folder)  # a wrong folder is reported before standard input is read
    question = (stdin.read() if flags.prompt is None else flags.prompt).strip()
    if not question:
        raise ConfigError("the question is empty; give --prompt TEXT, or text on standard input")
    _session(flags, write).ask(question, flags.image)
    return 0


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = chat_parser()
    flags = parser.parse(arguments)
    if flags.folder is None and len(flags.tools) > 1:  # --tools comes first, and has taken the folder, too
        flags.folder = flags.tools.pop()
    if flags.folder is None:
        parser.error("FOLDER is missing: give the folder or the name of a model")
    return flags


def _session(flags: argparse.Namespace, write: Callable[[str], object]) -> ChatSession:
    params = SamplingParams(max_new_tokens=flags.max_new_tokens, temperature=flags.temperature, seed=flags.seed)
    own = {"system": flags.system, "device": flags.device, "stops": flags.stop, "tool_settings": _tool_settings(flags)}
    return ChatSession.load(flags.folder, params, write, **own)


def _tool_settings(flags: argparse.Namespace) -> ToolSettings | None:
    further = {name: value for name in ("max_turns", "parser") if (value := getattr(flags, name)) is not None}
    if flags.tools:
        return ToolSettings(tools=tools_of(tool_setting(flags.tools)), **further)
    if further:
        given = " and ".join(f"--{name.replace('_', '-')}={value}" for name, value in further.items())
        raise ConfigError(f"{given}: this is for answers with tools; give --tools, or leave it out")
    return None


def _greeting(session: ChatSession, flags: argparse.Namespace) -> str:
    if session.has_template:
        return f"{flags.folder} on {session.device}; {_COMMANDS}."
    return f"{flags.folder} on {session.device} has no chat template, so it continues each text alone; {_COMMANDS}."


def _talk(session: ChatSession, stdin: TextIO, write: Callable[[str], object], images: Sequence[str] = ()) -> None:
    """Answer lines until the input ends or the user quits; a line that cannot be answered changes nothing.

    The first question is about ``images``.
    """
    shown = list(images)
    for line in _lines(stdin, write):
        if line in ("/quit", "/exit"):
            return
        if line == "/reset":
            session.reset()
            shown = []
            write("(the conversation is empty)\n")
        elif line.startswith("/image "):
            with _reporting(write):
                name = line.removeprefix("/image ").strip()
                session.check_images([name])
                shown.append(name)
            _announce(shown, write)
        elif line.startswith("/"):
            write(f"({line.split()[0]} is no command; {_COMMANDS})\n")
        elif line:
            with _reporting(write):
                session.ask(line, shown)
                shown = []
            _announce(shown, write)  # of a question without an answer


def _announce(images: Sequence[str], write: Callable[[str], object]) -> None:
    """Write which images wait for the next question, if any do."""
    if images:
        write(f"(the next question shows {', '.join(images)})\n")


@contextmanager
def _reporting(write: Callable[[str], object]) -> Iterator[None]:
    """Write the reason why a question has no answer, in place of ending the conversation."""
    try:
        yield
    except KeyboardInterrupt:
        write("\n(stopped)\n")
    except (ConfigError, DataError, GenerationError) as error:
        write(f"({error}; /reset forgets the conversation)\n")


def _lines(stdin: TextIO, write: Callable[[str], object]) -> Iterator[str]:
    """Yield the lines of a terminal, with a mark before each, and with history and editing where Python has them."""
    with suppress(ImportError):  # there is none on Windows
        import readline  # noqa: F401
    while True:
        try:
            line = input("> ") if stdin is sys.stdin else stdin.readline()
        except (EOFError, KeyboardInterrupt):
            write("\n")
            return
        if not line and stdin is not sys.stdin:
            return
        yield line.strip()
