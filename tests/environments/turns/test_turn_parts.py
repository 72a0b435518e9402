"""Parts of responses, compared with a search for the marks of each family in the rendered text, and by hand."""

from __future__ import annotations

import random
from itertools import groupby
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from lightning_realloc.environments.turns.turn_parser import TurnParser
from lightning_realloc.environments.turns.turn_parts import TokenTexts, TurnParts
from tests.environments.turns.test_turn_parser import CALLS, FORMATS, RESPONSE_TEMPLATE, with_template
from tests.models import byte_tokenizer

EOS = 2
CALL = CALLS["hermes"]


def parts_of(format_name: Any, text: str, *, before: str = "", tokenizer: Any = None) -> list[tuple[str, str]]:
    """Return the runs of parts in a turn of one token per byte, and the text of each."""
    tokenizer = tokenizer or byte_tokenizer()
    own, prompt = (tokenizer(part, add_special_tokens=False)["input_ids"] for part in (text, before))
    parts = TurnParts(tokenizer, TurnParser(tokenizer, format_name), stop_token_ids=[EOS])
    found = parts.of_response(prompt, own, [True] * len(own))
    runs = [(part, list(run)) for part, run in groupby(zip(found, own, strict=True), key=lambda pair: pair[0])]
    return [(str(part), tokenizer.decode([token for _, token in run])) for part, run in runs]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        ("4", [("answer", "4")]),
        ("<eos>", [("answer", "<eos>")]),
        ("<think>Hm.</think>4<eos>", [("thinking", "<think>Hm.</think>"), ("answer", "4<eos>")]),
        ("<think>Hm. 漢", [("thinking", "<think>Hm. 漢")]),
        ("<think></think>", [("thinking", "<think></think>")]),
        # Blanks after a part belong to it, and so does the end of the turn.
        (f"<think>漢😀</think>\n\n{CALL}\n{CALL}<eos>",
         [("thinking", "<think>漢😀</think>\n\n"), ("calls", f"{CALL}\n{CALL}<eos>")]),
        (f"\n{CALL}", [("calls", f"\n{CALL}")]),
        (f"Well, {CALL} 😀", [("answer", "Well, "), ("calls", CALL), ("answer", " 😀")]),
        ("</think>4", [("answer", "</think>4")]),
        (f"<think>{CALL}</think>漢", [("thinking", f"<think>{CALL}</think>"), ("answer", "漢")]),
        # A malformed call with a name is one, and what the parser leaves in the content is answer.
        ('<tool_call>{"name": "add", "argu', [("calls", '<tool_call>{"name": "add", "argu')]),
        ("<tool_call>nothing</tool_call>", [("answer", "<tool_call>nothing</tool_call>")]),
    ],
)  # fmt: skip
def test_parts_of_a_turn_by_hand(text: str, expected: list[tuple[str, str]]) -> None:
    assert parts_of("hermes", text) == expected


def test_a_thought_that_the_prompt_opens_begins_the_turn() -> None:
    opened = "<|im_start|>assistant\n<think>\n"
    assert parts_of("text", "Hm.</think>4", before=opened) == [("thinking", "Hm.</think>"), ("answer", "4")]
    assert parts_of("text", "<eos>", before=opened) == [("thinking", "<eos>")]
    assert parts_of("text", "4", before=f"{opened}\n</think>\n\n") == [("answer", "4")]


def test_a_response_template_and_a_function() -> None:
    foreign, text = with_template("", RESPONSE_TEMPLATE), 'hm</t>Yes: !add({"a": 1})<eos>'
    expected = [("thinking", "hm</t>"), ("answer", "Yes: "), ("calls", '!add({"a": 1})<eos>')]
    assert parts_of(None, text, before="<user>Add!<bot><t>", tokenizer=foreign) == expected
    assert parts_of(None, "Yes<eos>", before="<bot>", tokenizer=foreign) == [("answer", "Yes<eos>")]
    assert parts_of(lambda text: {"content": text}, "<think>a</think>b") == [("answer", "<think>a</think>b")]
    # A thought that is no JSON cannot be read, and stays in the content.
    spec = {"start_anchor": "<bot>", "fields": {"thinking": {"open": "<t>", "close": "</t>", "content": "json"},
                                                "content": {}}}  # fmt: skip
    assert parts_of(spec, "<t>[1]</t>b") == [("thinking", "<t>[1]</t>"), ("answer", "b")]
    assert parts_of(spec, "<t>[1</t>b") == [("answer", "<t>[1</t>b")]


@pytest.mark.parametrize("name", sorted(set(CALLS) - {"llama3", "mistral", "mistral-args", "gpt-oss", "atem"}))
def test_every_format_has_calls_and_answers(name: str) -> None:
    assert parts_of(name, f"So: {CALLS[name]} 漢") == [("answer", "So: "), ("calls", CALLS[name]), ("answer", " 漢")]


def test_formats_know_their_parts() -> None:
    known = {name: TurnParser(byte_tokenizer(), name).parts for name in FORMATS}
    without = {"text": ("thinking", "answer"), "llama3": ("calls", "answer")}
    assert known == {name: without.get(name, ("thinking", "calls", "answer")) for name in FORMATS}
    assert TurnParser(byte_tokenizer(), lambda text: {"content": text}).parts == ("answer",)
    for template, shown in (("{{ '<think>' }}", True), ("{{ messages }}", False)):
        assert TurnParser(with_template(template)).shows_thoughts == shown
    reasoning = byte_tokenizer()
    reasoning.add_tokens(["</think>"])
    assert TurnParser(reasoning).shows_thoughts


def test_each_turn_is_read_by_itself_and_answers_are_in_no_part() -> None:
    tokenizer = byte_tokenizer()
    pieces = [("<think>a</think>b<eos>", True), ("<think>tool", False), ("c</think>d", True)]
    rows = [tokenizer(text)["input_ids"] for text, _ in pieces]
    mask = [chosen for row, (_, chosen) in zip(rows, pieces, strict=True) for _ in row]
    parts = TurnParts(tokenizer, TurnParser(tokenizer), stop_token_ids=[EOS])
    found = parts.of_response([5], [token for row in rows for token in row], mask)
    expected = ["thinking"] * 16 + ["answer"] * 2 + [None] * 11
    assert found == [*expected, *["answer"] * 10]
    # The answer may open a thought of the turn after it, as chat templates of thinking models do.
    asked = tokenizer("tool<think>\n")["input_ids"]
    mask = [True] * len(rows[0]) + [False] * len(asked) + [True] * len(rows[2])
    assert parts.of_response([5], [*rows[0], *asked, *rows[2]], mask)[-10:] == ["thinking"] * 9 + ["answer"]
    # A turn that ends in a later call is read again from its beginning, where the prompt may have opened a thought.
    opened = tokenizer("<think>\n" + " " * 50)["input_ids"]
    begun, whole = (parts.of_response(opened, rows[2][:n], [True] * n) for n in (1, len(rows[2])))
    assert begun == ["thinking"] and whole == ["thinking"] * 9 + ["answer"]


def pieces_tokenizer(*pieces: str, decoder: Any) -> PreTrainedTokenizerFast:
    """Return a tokenizer that has these tokens, to decode alone."""
    vocabulary = {piece: index for index, piece in enumerate(["<unk>", "<pad>", "<eos>", *pieces])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    backend.decoder = decoder
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", pad_token="<pad>")


def test_a_token_of_two_parts_belongs_to_the_one_where_it_begins() -> None:
    # In order: begins in the thought, twice; spans its end; all answer; spans the beginning of the call, and the call.
    pieces = ["<thi", "nk>Hm", ".</think>Y", "es!", " So:<tool_", 'call>{"name": "a"}</tool', "_call>", "."]
    tokenizer = pieces_tokenizer(*pieces, decoder=decoders.Fuse())
    parts = TurnParts(tokenizer, TurnParser(tokenizer, "hermes"), stop_token_ids=[EOS])
    found = parts.of_response([], range(3, 11), [True] * 8)
    assert found == [*["thinking"] * 3, *["answer"] * 2, *["calls"] * 2, "answer"]


SENTENCES = decoders.Sequence(
    [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
)
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


TOKENIZERS = {
    "bytes": byte_tokenizer(),
    "sentences": pieces_tokenizer("▁a", "b", "</think>", "漢", *BYTES, decoder=SENTENCES),
    "words": pieces_tokenizer("a", "b", "<think>", "漢", "c d", decoder=None),
}


def ids_of(name: str, text: str) -> list[int]:
    """Return tokens that decode to a text; of "sentences", those of its bytes."""
    tokenizer = TOKENIZERS[name]
    if name == "sentences":
        return list(tokenizer.convert_tokens_to_ids([BYTES[byte] for byte in text.encode()]))
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


WRITTEN = {
    "bytes": ["a", "</", "<eos>"],
    "sentences": [" a", "b", "</think>", "漢"],
    "words": [" a", " <think>", " c d"],
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_texts_and_starts_of_tokens_are_those_of_what_was_written(name: str) -> None:
    tokenizer, rng, texts = TOKENIZERS[name], random.Random(0), TokenTexts(TOKENIZERS[name])
    known = {text: ids_of(name, text) for text in ("é", "漢", "😀")} if name != "words" else {}
    for text in WRITTEN[name]:
        token = tokenizer.convert_tokens_to_ids(text.replace(" a", "▁a") if name == "sentences" else text.lstrip())
        known[text] = [token] if token else ids_of(name, text)
    for _ in range(100):
        written, begins, ids = "", [], []
        for _ in range(rng.randint(0, 8)):
            text = rng.choice(list(known))
            is_one = len(known[text]) == 1 or len(text) == 1
            begins += [len(written) + (0 if is_one else place) for place in range(len(known[text]))]
            written, ids = written + text, ids + known[text]
        assert texts.decoded(ids) == (written, begins)


def test_bytes_that_are_no_characters_do_not_move_the_tokens_after_them() -> None:
    texts = TokenTexts(TOKENIZERS["bytes"])
    first, *rest = ids_of("bytes", "漢")
    close = ids_of("bytes", "</")
    assert texts.decoded([first, *close]) == ("\ufffd</", [0, 1, 2])
    assert texts.decoded([first, rest[0], *close]) == ("\ufffd</", [0, 0, 1, 2])
    assert texts.decoded([first, first, *rest]) == ("\ufffd漢", [0, 0, 0, 0])
    text, starts = texts.decoded([first] * 1000)
    assert text == "\ufffd" * 1000 and starts == sorted(starts) and starts[-1] >= 990
