"""Flags that set the strategy's settings."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from jsonargparse import Namespace

from lightning_realloc.cli import Parser
from lightning_realloc.commands.parsing import load_yaml, strategy_with
from lightning_realloc.errors import ConfigError


def test_a_launcher_on_the_command_line_is_a_setting_of_the_strategy() -> None:
    path = "lightning_realloc.strategies.ReallocStrategy"
    ray = {"launcher": "ray", "max_failures": 2}
    assert strategy_with("realloc", ray) == Namespace(class_path=path, init_args=Namespace(**ray))
    assert strategy_with("realloc-static", ray).init_args == Namespace(plan="static", **ray)
    assert strategy_with("realloc_fork", {"launcher": "ray"}).init_args == Namespace(launcher="ray")
    given = Namespace(class_path="ReallocStrategy", init_args=Namespace(plan="plan.yaml", launcher="popen"))
    assert strategy_with(given, {"launcher": "ray"}).init_args == Namespace(plan="plan.yaml", launcher="ray")


@pytest.mark.parametrize("strategy", ["ddp", Namespace(class_path="lightning.pytorch.strategies.DDPStrategy")])
def test_a_launcher_for_another_strategy_is_refused(strategy: object) -> None:
    with pytest.raises(ConfigError, match=r"^--launcher needs strategy='realloc' or ReallocStrategy; this run's"):
        strategy_with(strategy, {"launcher": "ray"})


@pytest.mark.parametrize(
    ("text", "key", "lines"),
    [
        ("a: 1\nb: 2\na: 3\n", "a", (1, 3)),
        ("callbacks:\n- sets:\n    gsm: {data: a}\n    gsm: {data: b}\n", "gsm", (3, 4)),
        ("base: &base {a: 1}\none:\n  <<: *base\n  b: 1\n  b: 1\n", "b", (4, 5)),
        ("one: {b: 1, 'b': 2}", "b", (1, 1)),
    ],
)
def test_a_key_that_is_given_twice_is_refused(text: str, key: str, lines: tuple[int, int]) -> None:
    first, second = lines
    with pytest.raises(yaml.YAMLError, match=f"the key {key} is given in line {first} and in line {second}; keep one"):
        load_yaml(text)


def test_merge_keys_and_anchors_are_read_as_by_yaml() -> None:
    text = (
        "outer: {b: &b {<<: &a {x: 0, z: 1}, x: 1}}\nc: {<<: *b, x: 2}\nd: [*b, {<<: [*b, *a], z: 3}, {a: 1}, {a: 1}]\n"
    )
    assert load_yaml(text) == yaml.safe_load(text)


def test_a_repeated_key_is_refused_with_the_name_of_its_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.yaml").write_text("a: 1\nb: 2\na: 1\n")
    with pytest.raises(SystemExit):
        Parser().parse_path(tmp_path / "run.yaml")
    assert "run.yaml: the key a is given in line 1 and in line 3; keep one" in capsys.readouterr().err
