"""Equal workload for both arms of the comparison with TRL, and the error without TRL."""

from __future__ import annotations

import importlib.util

import pytest

from benchmarks import trl
from benchmarks.harness import BenchmarkReport
from benchmarks.workload import byte_tokenizer, random_texts, share_of_vowels


def test_without_trl_the_benchmark_ends_with_the_command_to_install_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert trl.main([]) == 2
    assert "pip install -e '.[bench]'" in capsys.readouterr().err


def test_the_ratio_is_of_cpu_time_and_taken_turn_by_turn() -> None:
    def turn(cpu_s: float) -> trl.Turn:
        return trl.Turn(cpu_s, wall_s=99.0, rewards=(0.1, 0.2), new_tokens=64.0, peak_bytes=1 << 30)

    work = trl.Workload(steps=4)
    report = BenchmarkReport("trl")
    trl.fill(report, work, {"trl": [turn(8.0), turn(80.0)], "realloc": [turn(4.0), turn(40.0)]})
    (target,) = report.targets
    assert (target.value, target.met) == (2.0, True)
    ours = report.rows[1]
    # The median of 4 s and 40 s is 22 s for 4 steps of 16 sequences with 64 new tokens.
    assert ours["cpu_s_per_step"] == 5.5
    assert ours["sequences_per_cpu_s"] == pytest.approx(16 / 5.5)
    assert ours["new_tokens_per_cpu_s"] == pytest.approx(16 * 64 / 5.5)
    assert (ours["first_reward"], ours["last_reward"], ours["peak_mib"]) == (0.1, 0.2, 1024)


def test_random_texts_have_one_token_per_letter_and_depend_on_the_seed_alone() -> None:
    texts = random_texts(3, length=32, seed=1)
    assert texts == random_texts(3, length=32, seed=1) != random_texts(3, length=32, seed=2)
    tokenizer = byte_tokenizer()
    assert [len(tokenizer(text)["input_ids"]) for text in texts] == [32] * 3
    assert tokenizer.decode(tokenizer(texts[0])["input_ids"]) == texts[0]


def test_the_reward_is_the_share_of_vowels() -> None:
    assert share_of_vowels(completions=["aeiou", "axxx", ""]) == [1.0, 0.25, 0.0]
