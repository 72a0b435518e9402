"""Conversations of a run as messages of a report: in the page's data, and as text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lightning_realloc.report.runs import conversations
from lightning_realloc.report.runs.conversations import MAX_TEXT_CHARACTERS, read_conversations, shown_conversation
from lightning_realloc.report.runs.page import script_text
from lightning_realloc.report.runs.text import markdown_report
from tests.report.runs.folders import HOSTILE, content_of, section_of, talk, write_run, write_talks


def test_turns_have_their_thoughts_calls_answers_seconds_and_rewards() -> None:
    shown = shown_conversation(talk(3), 0)
    assert (shown["step"], shown["turns"], shown["seconds"], shown["failure"]) == (3, 2, 0.75, None)
    assert shown["facts"] == [["reward", "1.5"], ["finish_reason", "stop"]]
    asked, calling, answer, last = shown["messages"]
    assert (asked["role"], asked["text"]) == ("user", "What is 1 + 2?\n[image]")
    assert (calling["thought"], calling["calls"]) == ("I add.", ['add(a=1, b="zwei ü")'])
    assert (calling["reward"], calling["seconds"]) == (0.5, 0.5)
    assert (answer["role"], answer["name"], answer["text"], "reward" in answer) == ("tool", "add", "3", False)
    assert (last["text"], last["reward"], last["seconds"]) == ("It is 3.", None, 0.25)


def test_messages_show_the_thumbnails_of_their_images_in_order() -> None:
    first, second, third = (f"{number:016x}-0.jpg" for number in range(3))
    shows = {"type": "image", "image": "<ball.png, 24 x 20>"}
    content = talk(3) | {"images": [first, second, third]}
    content["prompt"] = [{"role": "user", "content": [shows, {"type": "text", "text": "and"}, shows]}]
    content["messages"] = [*content["messages"], {"role": "tool", "name": "draw", "content": [shows, shows]}]
    shown = shown_conversation(content, 0)["messages"]
    assert (shown[0]["text"], shown[0]["pictures"]) == ("[image]\nand\n[image]", [first, second])
    assert [message["pictures"] for message in shown[1:]] == [[], [], [], [third]], "there are no more files"
    for other in (None, "ball.png", ["../../secret.jpg"], [3]):  # written by something else
        shown = shown_conversation(content | {"images": other}, 0)["messages"]
        assert not any(message["pictures"] for message in shown)


def test_a_turn_that_was_cut_off_has_no_seconds_and_long_texts_are_cut() -> None:
    content = talk(0, failure="the tool hangs")
    content["messages"] = [*content["messages"], {"role": "assistant", "content": "x" * 10_000}]
    shown = shown_conversation(content, 0)
    assert shown["failure"] == "the tool hangs" and shown["messages"][-1]["seconds"] is None
    assert len(shown["messages"][-1]["text"]) < MAX_TEXT_CHARACTERS + 30
    assert shown["messages"][-1]["text"].endswith("… (10,000 characters)")
    content["messages"] = [{"role": "user", "content": "?"}] * 500
    assert len(shown_conversation(content, 0)["messages"]) + shown_conversation(content, 0)["num_left_out"] == 501


def test_the_newest_conversations_are_kept_and_broken_lines_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, problems = tmp_path / "rollouts.jsonl", list[str]()
    assert read_conversations(path, problems) == ()
    lines = [json.dumps(talk(step)) for step in range(150)]
    broken = ["[1]", '{"step": 1}', json.dumps(talk(1) | {"messages": [3]}), "[" * 100_000]
    path.write_text("\n".join([*lines, *broken, lines[0][:40]]))  # the last one is being written
    found = read_conversations(path, problems)
    assert [one["step"] for one in found] == list(range(149, 53, -1))  # 100 lines, of which four are broken
    assert problems == ["rollouts.jsonl has 4 broken lines; they are left out"]
    monkeypatch.setattr(conversations, "MAX_CHARACTERS", 3 * len(json.dumps(found[0])) + 10)
    assert len(read_conversations(path, problems)) == 3


def test_a_report_has_the_conversations_of_its_run_and_no_html_of_theirs(tmp_path: Path) -> None:
    folder = write_run(tmp_path)
    hostile: Any = talk(2, failure=HOSTILE)
    hostile["messages"] = [{"role": HOSTILE, "name": HOSTILE, "content": HOSTILE}, *hostile["messages"]]
    write_talks(folder, [talk(1), hostile])
    data = content_of(folder)
    shown = section_of(data, "rollouts")["conversations"]
    assert [one["step"] for one in shown] == [2, 1]
    assert shown[0]["failure"] == HOSTILE and "<" not in script_text(data)
    text = markdown_report(data)
    assert "### Conversation of iteration 1, 750 ms, reward 1.5, finish reason stop" in text
    assert '- **assistant**, reward 0.5, in 500 ms: thinks: I add. \\| calls add(a=1, b="zwei ü")' in text
    assert "- **tool add**: 3" in text and "<script" not in text
