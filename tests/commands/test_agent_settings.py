"""Values of ``--tools`` and ``--environment``: files, import paths and names."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_realloc.commands.agent_settings import environment_setting, tool_setting
from lightning_realloc.commands.short_run import configuration, read_command_line, short_parser
from lightning_realloc.environments.tools.tool import tools_of
from lightning_realloc.errors import ConfigError

TOOLS = '''
from functools import lru_cache
from os.path import join
from lightning_realloc.environments.python_tool import python_tool

@lru_cache
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: First number.
        b: Second number.
    """
    return _sum(a, b)

async def ping() -> str:
    """Answer at once."""
    return "pong"

quick = python_tool(timeout_s=1)
LIMIT = 3

class Kind:
    """No tool."""

def _sum(*numbers):
    return sum(numbers)
'''
GAME = """
from lightning_realloc import MessageEnvironment

class Game(MessageEnvironment):
    pass
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder, as the command line makes it importable."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    files = {
        "own_tools.py": TOOLS,
        "own_game.py": GAME,
        "nothing.py": "from os.path import join\nLIMIT = 3\n",
        "undescribed.py": "def helper(a):\n    return a\n",
        "broken.py": "1 / 0\n",
        "json.py": "",
        "below/more.py": "def ping() -> str:\n    '''Answer.'''\n    return 'pong'\n",
    }
    (tmp_path / "below").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    yield tmp_path
    for name in set(sys.modules) - before:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


def test_a_file_stands_for_the_public_functions_and_tools_that_it_defines(folder: Path) -> None:
    paths = tool_setting(["own_tools.py"])
    assert paths == ["own_tools:add", "own_tools:ping", "own_tools:quick"]
    assert [tool.name for tool in tools_of(paths)] == ["add", "ping", "python"]
    assert tool_setting([str(folder / "own_tools.py:ping"), "below/more.py"]) == ["own_tools:ping", "below.more:ping"]


def test_a_file_has_the_name_by_which_its_own_folder_imports_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(folder / "below"))
    assert tool_setting(["below/more.py"]) == ["more:ping"]


def test_import_paths_and_names_need_no_file(folder: Path) -> None:
    given = ["python", "package.module:search", "package.module.search"]
    assert tool_setting(given) == ["lightning_realloc.environments.python_tool:python", *given[1:]]
    assert [tool.name for tool in tools_of(tool_setting(["python"]))] == ["python"]
    assert environment_setting("package.module:Game") == "package.module:Game"
    assert environment_setting("own_game.py:Game") == "own_game:Game"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("nowhere.py", "--tools: there is no 'nowhere.py' in "),
        ("nothing.py", "--tools=nothing.py defines no public function"),
        ("undescribed.py", "--tools=undescribed.py: tool 'helper' cannot be described to the model"),
        ("undescribed.py", "or begin the name of a function that is no tool with _"),
        ("own_tools.py:sub", "there is no sub in the file; its public functions are add, ping, quick"),
        ("broken.py", "--tools: 'broken.py' cannot be imported (ZeroDivisionError: division by zero)"),
        ("json.py", "another module than 'json.py' has the name json"),
        ("pythn", "--tools=pythn is unknown; did you mean python?"),
        ("search", "--tools=search is unknown; give a Python file, whose public functions are the tools"),
    ],
)
def test_tools_that_are_not_there_are_refused(folder: Path, given: str, message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        tool_setting([given])
    assert message in str(refusal.value)


def test_a_file_that_cannot_be_imported_by_name_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry != str(folder)])
    with pytest.raises(ConfigError, match="run the command in the file's folder, or add that to PYTHONPATH"):
        tool_setting(["own_tools.py"])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("own_game.py", "--environment=own_game.py must name a class of own_game.py, as own_game.py:Class; it defines"),
        ("own_game.py:Games", "it defines Game"),
        ("nowhere.py:Game", "--environment: there is no 'nowhere.py' in "),
        ("Game", "--environment=Game is no import path; give a class as file.py:Class or module:Class"),
    ],
)
def test_environments_that_are_not_there_are_refused(folder: Path, given: str, message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        environment_setting(given)
    assert message in str(refusal.value)


# ---- flags of one-line commands
def _model(folder: Path, *flags: str, name: str = "grpo") -> dict[str, Any]:
    import json

    (folder / "rows.jsonl").write_text("{}")
    line = ["--model", "M", "--data", "rows.jsonl", *flags]
    run = read_command_line(name, line, precision=lambda: None)
    settings: dict[str, Any] = json.loads(run.fit_arguments[2])["model"]["init_args"]
    return settings


@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_flags_of_agents_become_settings_of_the_algorithm(folder: Path, name: str) -> None:
    flags = ("--tools", "own_tools.py:add", "a.b:f", "--tools", "python", "--max-turns", "3", "--reward", "exact")
    settings = _model(folder, *flags, name=name)
    assert settings["tools"] == ["own_tools:add", "a.b:f", "lightning_realloc.environments.python_tool:python"]
    assert settings["conversation"] == {"max_turns": 3} and "environment" not in settings


def test_an_environment_may_give_the_reward(folder: Path) -> None:
    settings = _model(folder, "--environment", "own_game.py:Game")
    assert settings["environment"] == "own_game:Game"
    assert not {"reward", "tools", "conversation"} & settings.keys()
    assert _model(folder, "--environment", "own_game:Game", "--reward", "exact")["reward"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--tools", "own_tools.py"), "grpo needs --reward"),
        (("--reward", "exact", "--max-turns", "3"), "--max-turns=3 bounds a conversation with tools or an environment"),
        (("--tools", "python", "--reward", "exact", "--max-turns", "0"), "--max-turns=0 must be at least 1"),
        (("--reward", "exact", "--max_turns", "3"), "there is no flag --max_turns; did you mean --max-turns"),
        (("--reward", "exact", "--tools", "nowhere.py"), "--tools: there is no 'nowhere.py'"),
    ],
)
def test_flags_of_agents_that_contradict_each_other_are_refused(
    folder: Path, flags: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError) as refusal:
        _model(folder, *flags)
    assert message in str(refusal.value)


def test_commands_that_do_not_generate_have_no_tools() -> None:
    with pytest.raises(ConfigError, match="there is no flag --tools"):
        short_parser("sft").parse(["--tools", "python"])
    flags = short_parser("sft").parse(["--model", "M", "--data", "D"])
    assert "tools" not in configuration("sft", flags, "D", None)["model"]["init_args"]
