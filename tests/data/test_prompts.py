"""PromptDataModule: batches from files and data sets, text and chat prompts, and errors for invalid ones."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from datasets import Dataset
from lightning.pytorch.cli import LightningCLI
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerBase

from lightning_realloc.batch.samples import EXTRA_INPUT, Ragged, Samples, model_inputs
from lightning_realloc.data.prompts import PromptDataModule
from lightning_realloc.data.rows import Row
from lightning_realloc.data.sampling.curriculum import Curriculum
from lightning_realloc.data.sampling.mixture import Mixture
from lightning_realloc.data.sources import DatasetSource
from lightning_realloc.errors import DataError
from tests.models import byte_tokenizer, tiny_model

ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(4) for b in range(3)]
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role[0] }}:{{ message.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


def _module(data: Any = ROWS, **settings: Any) -> PromptDataModule:
    module = PromptDataModule(data, **{"batch_size": 4, "tokenizer": byte_tokenizer(), **settings})
    module.setup()
    return module


def _chat_tokenizer() -> Any:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def test_texts_and_messages_keep_their_order_and_an_invalid_row_is_named() -> None:
    tokenizer = _chat_tokenizer()
    rows = [{"prompt": [{"role": "user", "content": str(n)}] if n % 3 == 0 else f"<{n}>"} for n in range(2500)]
    (batch,) = _module(rows, batch_size=2500, shuffle=False, tokenizer=tokenizer).train_dataloader()
    texts = tokenizer.batch_decode(batch.ragged("prompt_ids").to_lists())
    assert texts == [f"u:{n}<eos>\na:" if n % 3 == 0 else f"<{n}>" for n in range(2500)]
    rows[1234] = {"prompt": "\ud800"}  # half a surrogate pair, which JSON can contain
    with pytest.raises(DataError, match=r"row 1234 of the data set: \w+ cannot encode str .* correct the text"):
        _module(rows, tokenizer=tokenizer)
    rows[1234] = {"prompt": ""}
    with pytest.raises(DataError, match="row 1234 of the data set: a prompt needs at least one token"):
        _module(rows, tokenizer=tokenizer)


def test_only_an_environment_lets_the_data_lack_prompts() -> None:
    with pytest.raises(DataError, match=r"an environment of messages writes the prompts, .* has none, .* or data="):
        _module(None)
    with pytest.raises(DataError, match=r"no column 'prompt', only \['answer'\]; .* set prompt_column to one of them"):
        _module([{"answer": "4"}])


def test_batches_hold_token_ids_the_prompt_and_every_other_column(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    tokenizer = byte_tokenizer()
    for data in (path, ROWS, Dataset.from_list(ROWS)):
        batches = list(_module(data, shuffle=False).train_dataloader())
        assert [batch.ids.tolist() for batch in batches] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
        prompts = [row["prompt"] for row in ROWS[4:8]]
        assert batches[1].objects("prompt") == tuple(prompts)
        assert batches[1].objects("answer") == tuple(row["answer"] for row in ROWS[4:8])
        assert tokenizer.batch_decode(batches[1].ragged("prompt_ids").to_lists()) == prompts


def test_conversations_go_through_the_chat_template() -> None:
    messages = [{"role": "system", "content": "add"}, {"role": "user", "content": "1+1"}]
    tokenizer = _chat_tokenizer()
    (batch,) = _module([{"prompt": messages}], batch_size=1, tokenizer=tokenizer).train_dataloader()
    assert tokenizer.decode(batch.ragged("prompt_ids").values) == "s:add<eos>\nu:1+1<eos>\na:"
    assert batch.objects("prompt") == (messages,)
    with pytest.raises(DataError, match=r"row 0 of the data set is a conversation, and .* no chat template"):
        _module([{"prompt": messages}], batch_size=1)


@pytest.mark.parametrize(
    ("setting", "has_template", "rendered"),
    [
        ("plain", True, "1+1"),
        ("user", True, "u:1+1<eos>\na:"),
        ("auto", True, "u:1+1<eos>\na:"),
        ("auto", False, "1+1"),
    ],
)
def test_text_becomes_a_user_message_if_asked_for(setting: str, has_template: bool, rendered: str) -> None:
    tokenizer = _chat_tokenizer() if has_template else byte_tokenizer()
    module = _module([{"prompt": "1+1"}], batch_size=1, tokenizer=tokenizer, text_prompts=setting)
    (batch,) = module.train_dataloader()
    assert tokenizer.decode(batch.ragged("prompt_ids").values) == rendered
    assert batch.objects("prompt") == ("1+1",)  # reward functions receive text


def test_a_text_needs_a_template_to_become_a_message() -> None:
    with pytest.raises(DataError, match="no chat template"):
        _module([{"prompt": "1+1"}], batch_size=1, text_prompts="user")
    with pytest.raises(DataError, match="text_prompts='chat' must be one of plain, user, auto"):
        PromptDataModule(ROWS, batch_size=1, text_prompts="chat")  # type: ignore[arg-type]


def test_a_prompt_may_end_with_the_beginning_of_an_answer() -> None:
    begun = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "It is"}]
    module = _module([{"prompt": begun}], batch_size=1, tokenizer=_chat_tokenizer())
    module.setup()
    (batch,) = module.train_dataloader()
    assert byte_tokenizer().decode(batch.ragged("prompt_ids").values) == "u:1+1<eos>\na:It is"


def test_template_settings_of_the_row_override_those_of_the_data_module() -> None:
    tokenizer = _chat_tokenizer()
    tokenizer.chat_template += "{% if think is defined %}{{ think }}{% endif %}{{ '!' if loud else '' }}"
    rows = [{"prompt": [{"role": "user", "content": "1"}], "chat_template_kwargs": own} for own in
            ({"think": "no"}, None, {"think": None, "loud": True}, '{"think": "json"}')]  # fmt: skip

    def opened(**settings: Any) -> list[str]:
        module = _module(rows, batch_size=4, shuffle=False, tokenizer=tokenizer, **settings)
        (batch,) = module.train_dataloader()
        return [
            text.removeprefix("u:1<eos>\na:") for text in tokenizer.batch_decode(batch.ragged("prompt_ids").to_lists())
        ]

    assert opened() == ["no", "", "!", "json"]
    assert opened(chat_template_kwargs={"think": "yes"}) == ["no", "yes", "yes!", "json"]
    with pytest.raises(
        DataError, match=r"PromptDataModule: chat_template_kwargs holds \['tools'\], which data modules"
    ):
        opened(chat_template_kwargs={"tools": []})
    rows[2]["chat_template_kwargs"] = 3
    with pytest.raises(
        DataError, match=r"row 2 of the data set: its chat_template_kwargs must be a mapping, or JSON of one; got int 3"
    ):
        opened()


def test_a_prompt_that_ends_with_a_tool_call_is_refused() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": {}}}]}
    with pytest.raises(DataError, match="row 0 of the data set: its last message calls tools without a result"):
        _module([{"prompt": [{"role": "user", "content": "1"}, call]}], batch_size=1, tokenizer=_chat_tokenizer())


def test_a_templates_error_is_quoted_with_the_row() -> None:
    tokenizer = _chat_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('no system role') }}"
    with pytest.raises(DataError, match=r"row 0 of the data set: .*\['user'\] \(TemplateError: no system role\)"):
        _module([{"prompt": [{"role": "user", "content": "1+1"}]}], tokenizer=tokenizer)


def test_the_end_token_of_the_tokenizer_is_removed_from_prompts() -> None:
    tokenizer = byte_tokenizer()
    end = (tokenizer.eos_token, tokenizer.eos_token_id)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{end[0]} $A {end[0]}", special_tokens=[end]
    )
    module = _module([{"prompt": "1+1="}], batch_size=1, tokenizer=tokenizer)
    (batch,) = module.train_dataloader()
    assert tokenizer.decode(batch.ragged("prompt_ids").values) == "<eos>1+1="


def test_another_column_can_hold_the_prompts() -> None:
    (batch,) = _module([{"question": "why?"}], prompt_column="question", batch_size=1).train_dataloader()
    assert batch.objects("prompt") == batch.objects("question") == ("why?",)
    with pytest.raises(DataError, match="'prompt' as well as prompt_column='question'"):
        _module([{"question": "why?", "prompt": "x"}], prompt_column="question")


def test_held_out_rows_are_not_trained_on() -> None:
    module = _module(val_fraction=0.4, batch_size=1)
    train = {batch.objects("prompt")[0] for batch in module.train_dataloader()}
    held_out = {batch.objects("prompt")[0] for batch in module.val_dataloader()}
    assert train and held_out and not train & held_out
    assert train | held_out == {row["prompt"] for row in ROWS}
    assert len(list(_module(val_data=ROWS[:3]).val_dataloader())) == 1
    assert list(_module().val_dataloader()) == []


@pytest.mark.parametrize(
    ("rows", "settings", "rule"),
    [
        ([{"text": "a"}], {}, r"line 1 has no column 'prompt', only \['text'\]; .* set prompt_column to one of them"),
        ([{"prompt": "a"}, {"prompt": 3}], {}, "line 2: expected text or a list of messages .* got int 3"),
        ([{"prompt": "a"}, {"prompt": ""}], {}, "line 2: a prompt needs at least one token"),
        (
            [{"prompt": "a"}, {"prompt": "abcde"}],
            {"max_prompt_tokens": 4},
            "line 2 has 5 tokens, and max_prompt_tokens",
        ),
        ([{"prompt": "a", "completions": 1}], {}, r"rename the columns \['completions'\]"),
        ([{"prompt": "abcde"}], {"max_prompt_tokens": 4, "long_prompts": "drop"}, "no prompt is left"),
        ([{"prompt": "a"}], {"val_fraction": 0.5}, "leaves . rows to train on and . held out of 1"),
    ],
)
def test_unusable_rows_are_refused_with_file_and_line(
    tmp_path: Path, rows: list[dict[str, Any]], settings: dict[str, Any], rule: str
) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError, match=rule):
        _module(path, **settings)


def test_long_prompts_are_truncated_to_their_end_or_dropped() -> None:
    rows = [{"prompt": "abcde"}, {"prompt": "xy"}]
    tokenizer = byte_tokenizer()
    for choice, expected in (("truncate", ["cde", "xy"]), ("drop", ["xy"])):
        module = _module(rows, max_prompt_tokens=3, long_prompts=choice, batch_size=1, shuffle=False)
        texts = [tokenizer.decode(batch.ragged("prompt_ids").values) for batch in module.train_dataloader()]
        assert texts == expected


def test_contradictory_settings_are_refused() -> None:
    with pytest.raises(DataError, match="both name held-out rows"):
        PromptDataModule(ROWS, batch_size=1, val_data=ROWS, val_fraction=0.5)
    with pytest.raises(DataError, match=r"val_fraction=1.0"):
        PromptDataModule(ROWS, batch_size=1, val_fraction=1.0)
    with pytest.raises(DataError, match=r"val_fraction=None must be a number"):
        PromptDataModule(ROWS, batch_size=1, val_fraction=None)
    with pytest.raises(DataError, match="max_prompt_tokens=0"):
        PromptDataModule(ROWS, batch_size=1, max_prompt_tokens=0)
    with pytest.raises(DataError, match=r"call setup\(\) first"):
        PromptDataModule(ROWS, batch_size=1).train_dataloader()
    with pytest.raises(DataError, match="has no tokenizer"):
        PromptDataModule(ROWS, batch_size=1).setup()


class _Role:
    def config(self) -> Any:
        return tiny_model("llama").config  # 128 positions


class _Pictures(PromptDataModule):
    """Makes a further input of the model from a column of the rows: a row of pixels for each placeholder."""

    def tabulate(self, rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase) -> Samples:
        """Return the kept rows with their pixels."""
        made = super().tabulate(rows, tokenizer)
        pixels = [torch.tensor(picture) for picture in made.objects("picture")]
        return made.with_columns(**{f"{EXTRA_INPUT}pixels": Ragged.from_list(pixels)})


def test_a_subclass_makes_further_inputs_of_the_rows_that_are_kept() -> None:
    rows = [{"prompt": "#" * n, "picture": [[float(n), 0.5]] * n} for n in (1, 2, 9, 3, 4)]
    data = _Pictures(rows, batch_size=2, tokenizer=byte_tokenizer(), max_prompt_tokens=5, long_prompts="drop")
    data.setup()
    for batch in data.train_dataloader():
        for given, prompt in zip(model_inputs(batch), batch.objects("prompt"), strict=True):
            assert given.extras["pixels"].tolist() == [[float(len(str(prompt))), 0.5]] * len(str(prompt))
    with pytest.raises(DataError, match=r"column 'image' holds .* or a tabulate\(\) of your own read it"):
        _module([{"prompt": "#", "image": "cat.png"}])


class _Model(L.LightningModule):
    """A module with a tokenizer and models, like the algorithms."""

    tokenizer = byte_tokenizer()

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.batches: list[Samples] = []

    def roles(self) -> tuple[_Role, ...]:
        return (_Role(),)

    def training_step(self, batch: Samples, batch_idx: int) -> torch.Tensor:
        self.batches.append(batch)
        return self.weight.sum()

    def validation_step(self, batch: Samples, batch_idx: int) -> None:
        pass

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _trainer() -> L.Trainer:
    return L.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip


def test_validate_without_held_out_rows_is_refused_and_fit_is_not() -> None:
    with pytest.raises(DataError, match=r"validate needs held-out rows, and PromptDataModule has none; give val_data="):
        _trainer().validate(_Model(), PromptDataModule(ROWS, batch_size=4), verbose=False)
    _trainer().fit(_Model(), PromptDataModule(ROWS, batch_size=4))


def test_tokenizer_and_context_come_from_the_module_in_training() -> None:
    model = _Model()
    _trainer().fit(model, PromptDataModule(ROWS, batch_size=4))
    assert sorted(i for batch in model.batches for i in batch.ids.tolist()) == list(range(12))
    rows = [{"prompt": "x" * 127}, {"prompt": "x" * 128}]
    with pytest.raises(
        DataError, match=r"row 1 .* has 128 tokens, and the models' context of 128 positions allows 127"
    ):
        _trainer().fit(_Model(), PromptDataModule(rows, batch_size=1))


def _from_yaml(folder: Path, settings: str) -> PromptDataModule:
    config = folder / "config.yaml"
    config.write_text(
        f"data:\n  class_path: {PromptDataModule.__module__}.PromptDataModule\n  init_args: {{{settings}}}\n"
    )
    cli = LightningCLI(
        _Model, L.LightningDataModule, subclass_mode_data=True, run=False, args=["--config", str(config)],
        save_config_callback=None,
    )  # fmt: skip
    assert isinstance(cli.datamodule, PromptDataModule)
    return cli.datamodule


def test_a_yaml_file_configures_the_data(tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text(json.dumps(ROWS[0]))
    data = _from_yaml(tmp_path, f"data: {tmp_path}/prompts.jsonl, batch_size: 1, long_prompts: drop")
    assert data.data == f"{tmp_path}/prompts.jsonl" and data.long_rows == "drop"
    sets = "{gsm: {path: openai/gsm8k, name: main}, code: code.jsonl}"
    mix = "[[0, {gsm: 1.0, code: 0.0}], [20, {gsm: 0.5, code: 0.5}]]"
    data = _from_yaml(tmp_path, f"data: {sets}, batch_size: 1, mix: {mix}, curriculum: {{target: 0.6, rest: 2.0}}")
    assert data.data == {"gsm": DatasetSource("openai/gsm8k", name="main"), "code": "code.jsonl"}
    assert data.curriculum == Curriculum(target=0.6, rest=2.0)
    assert Mixture(data.mix, ["gsm", "code"]).counts(20, 2, {"gsm": 40, "code": 0}) == {"gsm": 1, "code": 1}
    assert _from_yaml(tmp_path, "data: a.jsonl, batch_size: 1, curriculum: balanced").curriculum == Curriculum()


def test_invalid_settings_are_refused_at_construction() -> None:
    with pytest.raises(DataError, match="'cut', must be one of refuse, truncate, drop"):
        PromptDataModule(ROWS, batch_size=4, long_prompts="cut")  # type: ignore[arg-type]
    with pytest.raises(DataError, match="batch_size='8' must be a whole number"):
        PromptDataModule(ROWS, batch_size="8")  # type: ignore[arg-type]
