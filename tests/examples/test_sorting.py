"""The demo's task: words, answers and a lossless tokenizer."""

from __future__ import annotations

import random
from pathlib import Path

from transformers import AutoTokenizer

from examples import sorting


def test_words_differ_and_repeat_no_letter() -> None:
    words = sorting.random_words(500, random.Random(0))
    assert len(set(words)) == 500
    assert all(len(set(word)) == len(word) and len(word) in sorting.WORD_LENGTHS for word in words)


def test_the_answer_is_the_right_demonstration_and_the_reverse_of_the_wrong_one() -> None:
    assert sorting.problem("hbqe") == {"prompt": "sort hbqe: ", "answer": "behq"}
    assert sorting.demonstration("hbqe", right=True) == {"prompt": "sort hbqe: ", "completion": "behq"}
    assert sorting.demonstration("hbqe", right=False) == {"prompt": "sort hbqe: ", "completion": "qheb"}


def test_jsonl_files_read_back_as_written(tmp_path: Path) -> None:
    rows = [sorting.problem(word) for word in ("abc", "zyx")]
    sorting.write_jsonl(tmp_path / "rows.jsonl", rows)
    assert sorting.read_jsonl(tmp_path / "rows.jsonl") == rows


def test_the_tokenizer_has_a_token_per_byte_and_survives_saving(tmp_path: Path) -> None:
    sorting.byte_tokenizer().save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer("sort é: ")["input_ids"]
    assert len(ids) == len("sort é: ".encode())
    assert tokenizer.decode(ids) == "sort é: "
    assert len(tokenizer) <= sorting.tiny_llama().vocab_size
    assert tokenizer.convert_ids_to_tokens(sorting.tiny_llama().eos_token_id) == tokenizer.eos_token
