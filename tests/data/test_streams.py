"""Batches of streams: every row once per epoch, the same batches after a resume, and refused settings."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from datasets import Dataset, IterableDataset
from datasets.distributed import split_dataset_by_node
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_realloc.batch.ragged import Ragged
from lightning_realloc.batch.samples import Samples
from lightning_realloc.data.data_module import RowDataModule
from lightning_realloc.data.feedback import BinaryFeedbackDataModule
from lightning_realloc.data.loader import BatchLoader
from lightning_realloc.data.preferences import PreferenceDataModule
from lightning_realloc.data.prompts import PromptDataModule
from lightning_realloc.data.rows import NoUsableRowsError, Row, RowSource
from lightning_realloc.data.sources import DatasetSource
from lightning_realloc.data.streams.row_streams import RowStream
from lightning_realloc.data.streams.stream_loader import StreamLoader
from lightning_realloc.errors import CheckpointError, DataError
from tests.matrices import matrix
from tests.models import byte_tokenizer, tiny_model
from tests.strategies import runs
from tests.workers import WorkerPool

NUM_DRAWN = 22
"""Batches of a property: several epochs in most orders, and a part of one in the others."""
ROWS = [{"prompt": f"<{number}>", "answer": number} for number in range(23)]


def stream(rows: Sequence[Mapping[str, Any]] = ROWS) -> IterableDataset:
    return Dataset.from_list(list(rows)).to_iterable_dataset(num_shards=min(3, len(rows)))


def loader(num_rows: int, *, dropped: int = 0, group_size: int = 1, **options: Any) -> StreamLoader:
    """Return batches of rows with consecutive numbers, without multiples of ``dropped``."""

    def tabulate(rows: Sequence[Row]) -> Samples:
        kept = [row.values["at"] for row in rows if not dropped or row.values["at"] % dropped]
        if not kept:
            raise NoUsableRowsError(f"{rows[0].values['at']} is dropped")
        samples = [number for number in kept for _ in range(group_size)]
        columns = {"at": tuple(samples), "prompt_ids": Ragged.from_list([[number] for number in samples])}
        return Samples(torch.arange(len(samples)), columns)

    table = [{"at": number} for number in range(num_rows)]
    return StreamLoader(RowStream("numbers", table), tabulate, group_size=group_size, **options)


def drawn(batches: Iterable[Samples]) -> list[list[tuple[int, Any]]]:
    """Return ids and rows, batch by batch."""
    return [list(zip(batch.ids.tolist(), batch["at"], strict=True)) for batch in batches]  # type: ignore[arg-type]


ORDERS = st.fixed_dictionaries(
    {
        "batch_size": st.integers(1, 7),
        "shuffle": st.booleans(),
        "shuffle_buffer": st.integers(1, 20),
        "seed": st.integers(0, 3),
        "drop_last": st.booleans(),
        "group_size": st.integers(1, 2),
        "dropped": st.sampled_from([0, 2, 3]),
        "reads_ahead": st.booleans(),
    }
)


@settings(max_examples=10, deadline=None)
@given(st.integers(14, 40), ORDERS, st.integers(0, 16), st.integers(1, 8))
def test_a_resumed_stream_continues_after_the_last_batch(
    num_rows: int, order: dict[str, Any], stop: int, epoch_batches: int
) -> None:
    whole = drawn(islice(loader(num_rows, **order), NUM_DRAWN))
    begun = loader(num_rows, **order)
    begun.epoch_batches = epoch_batches
    epochs: Iterator[Samples] = chain.from_iterable(iter(begun) for _ in range(NUM_DRAWN))
    assert drawn(islice(epochs, stop)) == whole[:stop]
    state = json.loads(json.dumps(begun.state_dict()))
    # A resumed run, a run resumed from the state that this one saves before its first batch, the run that went on, and
    # its loader in a run that begins again at the state.
    resumed, again = (loader(num_rows, **order) for _ in range(2))
    resumed.load_state_dict(state)
    again.load_state_dict(resumed.state_dict())
    for other in (resumed, again):
        assert drawn(islice(other, NUM_DRAWN - stop)) == whole[stop:]
    assert drawn(islice(epochs, NUM_DRAWN - stop)) == whole[stop:]
    begun.load_state_dict(state)
    epochs = chain.from_iterable(iter(begun) for _ in range(NUM_DRAWN))
    assert drawn(islice(epochs, NUM_DRAWN - stop)) == whole[stop:]


@settings(max_examples=20, deadline=None)
@given(st.integers(14, 40), ORDERS)
def test_an_epoch_holds_every_row_once_and_ids_are_unique(num_rows: int, order: dict[str, Any]) -> None:
    size, group, dropped = order["batch_size"], order["group_size"], order["dropped"]
    kept = [number for number in range(num_rows) if not dropped or number % dropped]
    full, rest = divmod(len(kept), size)
    num_batches = full + (rest > 0 and not order["drop_last"])
    batches = drawn(islice(loader(num_rows, **order), 2 * num_batches))
    for epoch in (batches[:num_batches], batches[num_batches:]):
        assert [len(batch) for batch in epoch] == [size * group] * full + [rest * group] * (num_batches - full)
        seen = [at for _, at in chain(*epoch)]
        assert seen[::group] == seen[group - 1 :: group]  # a row's samples stay together
        rows = seen[::group]
        assert len(set(rows)) == len(rows) and set(rows) <= set(kept)
        assert len(rows) == (full * size if order["drop_last"] else len(kept))
        if not order["shuffle"]:
            assert rows == kept[: len(rows)]
        blocks = [at // order["shuffle_buffer"] for at in rows]
        assert blocks == sorted(blocks), "a row left its block"
    ids = [sample_id for sample_id, _ in chain(*batches)]
    assert len(set(ids)) == len(ids)
    # Ids count the samples that fit, in the order of the stream.
    assert {sample_id // group: at for sample_id, at in chain(*batches[:num_batches])}.items() <= dict(
        enumerate(kept)
    ).items()


def test_the_order_depends_on_seed_and_epoch_alone() -> None:
    def rows(seed: int, epoch: int) -> list[int]:
        batches = drawn(islice(loader(20, batch_size=5, seed=seed), 8))
        return [at for _, at in chain(*batches[4 * epoch : 4 * epoch + 4])]

    assert rows(0, 0) == rows(0, 0)
    assert len({tuple(rows(seed, epoch)) for seed in (0, 1) for epoch in (0, 1)}) == 4


def test_a_position_in_another_order_is_refused() -> None:
    state = loader(20, batch_size=5).state_dict()
    for change, told in (({"seed": 1}, "seed=0 and this run seed=1"), ({"shuffle_buffer": 9}, "block_rows=1000 and")):
        with pytest.raises(CheckpointError, match=told):
            loader(20, **{"batch_size": 5, **change}).load_state_dict(state)
    table = Samples(torch.arange(20), {"prompt_ids": Ragged.from_list([[1]] * 20)})
    with pytest.raises(CheckpointError, match="num_rows=None and this run num_rows=20"):
        BatchLoader(table, batch_size=5).load_state_dict(state)


def test_errors_while_reading_a_stream_name_the_row() -> None:
    with pytest.raises(DataError, match=r"numbers has fewer usable rows than batch_size=9 needs, 8; lower batch_size"):
        next(iter(loader(8, batch_size=9, drop_last=True)))
    with pytest.raises(DataError, match=r"batch_size=2 needs, 0; .* about the others: 0 is dropped"):
        next(iter(loader(8, batch_size=2, dropped=1)))
    with pytest.raises(DataError, match="numbers holds no rows"):
        loader(0, batch_size=1).check()
    with pytest.raises(DataError, match="numbers has no usable row among its first 1000; 0 is dropped"):
        loader(1500, batch_size=2, shuffle=False, dropped=1).check()
    loader(4, batch_size=1, shuffle=False, dropped=2).check()  # 0 is dropped, 1 is not
    with pytest.raises(DataError, match="shuffle_buffer=0 must be at least 1"):
        loader(8, batch_size=1, shuffle_buffer=0)

    def broken() -> Iterator[dict[str, Any]]:
        yield {"at": 0}
        raise ConnectionError("the line is dead")

    with pytest.raises(DataError, match=r"row 1 of the web cannot be read: ConnectionError\(the line is dead\); a run"):
        list(RowStream("the web", broken()).rows(0, 0))
    with pytest.raises(DataError, match=r"row 1 of the web must have the same columns as row 0 .* lacks 'at' and adds"):
        list(RowStream("the web", [{"at": 0}, {"to": 1}]).rows(0, 1))
    shorter = loader(10, batch_size=2, shuffle_buffer=5)
    place = {"epoch": 0, "block": 10, "position": 1, "num_before": 10}
    shorter.load_state_dict({**shorter.state_dict(), "place": place})
    with pytest.raises(DataError, match="numbers ended after 10 rows, but the resumed run was at row 10; give"):
        next(iter(shorter))


# ---- data modules
class Model(L.LightningModule):
    """A module with one parameter that records its batches."""

    tokenizer = byte_tokenizer()

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.seen: list[Any] = []

    def training_step(self, batch: Samples, batch_idx: int) -> torch.Tensor:
        self.seen.append((batch.ids.tolist(), batch.data.get("prompt")))
        return self.weight.sum()

    def validation_step(self, batch: Samples, batch_idx: int) -> None:
        self.seen.append(("held out", batch["prompt"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trainer(**options: Any) -> L.Trainer:
    return L.Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        **{"enable_checkpointing": False, **options},
    )  # fmt: skip


def fit(data: RowDataModule, *, resume: Path | None = None, **options: Any) -> list[Any]:
    """Return the samples of each step."""
    module = Model()
    trainer(**options).fit(module, data, ckpt_path=resume)
    return module.seen


def prompts(data: RowSource, **options: Any) -> PromptDataModule:
    return PromptDataModule(data, **{"batch_size": 4, "seed": 5, "shuffle_buffer": 6, **options})


# Lightning's epochs end with the run, before the stream ends, and after it.
@pytest.mark.parametrize("limit", matrix([None, 3, 8], None, 3))
def test_a_trainer_resumes_at_the_right_row(tmp_path: Path, limit: int | None) -> None:
    saver = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
    given = {"max_steps": 13, "limit_train_batches": limit}
    whole = fit(prompts(stream()), callbacks=[saver], enable_checkpointing=True, **given)
    assert len(whole) == 13
    for stop in (2, 3, 5, 8):
        assert whole[:stop] + fit(prompts(stream()), resume=tmp_path / f"step={stop}.ckpt", **given) == whole


@pytest.mark.parametrize(("streams", "overfit"), [(False, 1), (False, 2), (False, 0.5), (True, 1), (True, 2)])
def test_an_overfitting_run_repeats_the_first_batches_in_every_epoch(streams: bool, overfit: float) -> None:
    data = prompts(stream() if streams else ROWS, val_data=ROWS)
    seen = fit(data, max_epochs=2, overfit_batches=overfit, num_sanity_val_steps=0)
    of_all = (len(ROWS) // 4, -(-len(ROWS) // 4))  # a small last batch is kept in validation and dropped in training
    count, num_held_out = (overfit if isinstance(overfit, int) else int(overfit * batches) for batches in of_all)
    expected = [tuple(row["prompt"] for row in ROWS[at : at + 4]) for at in range(0, len(ROWS), 4)]
    assert [texts for kind, texts in seen if kind == "held out"] == expected[:num_held_out] * 2
    trained = [(ids, texts) for ids, texts in seen if ids != "held out"]
    assert [texts for _, texts in trained] == expected[:count] * 2
    assert len({sample_id for ids, _ in trained for sample_id in ids}) == 4 * count * 2
    # Without overfit_batches the same data module shuffles again.
    assert [texts for _, texts in fit(data, max_steps=2, limit_val_batches=0)] != expected[:1] * 2


def test_overfitting_a_fraction_of_a_stream_is_refused() -> None:
    with pytest.raises(DataError, match=r"overfit_batches=0\.5 is a fraction, but a stream has no length; give a"):
        fit(prompts(stream()), max_steps=2, overfit_batches=0.5)


def test_files_folders_and_objects_stream_the_same_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved")
    expected = fit(prompts(Dataset.from_list(ROWS).to_iterable_dataset()), max_steps=7)
    assert {text for _, texts in expected[:5] for text in texts} < {row["prompt"] for row in ROWS}
    for name in ("rows.jsonl", "saved"):
        assert fit(prompts(DatasetSource(str(tmp_path / name), streaming=True)), max_steps=7) == expected


def test_a_stream_shuffled_by_datasets_has_another_order_in_every_epoch() -> None:
    data = RowStream("shuffled", stream().shuffle(seed=3, buffer_size=10))
    orders = [[row.values["answer"] for row in data.rows(epoch, 0)] for epoch in (0, 1, 0)]
    assert orders[0] == orders[2] != orders[1]
    assert [row.values["answer"] for row in data.rows(1, 7)] == orders[1][7:]


PAIRS = [{"prompt": f"{n}+1=", "chosen": f"{n + 1}", "rejected": "0", "margin": float(n)} for n in range(9)]


@pytest.mark.parametrize("module_class", [PreferenceDataModule, BinaryFeedbackDataModule])
def test_pairs_and_feedback_are_the_samples_of_a_table(module_class: type[Any]) -> None:
    """Streams with one block for all rows give the batches of a table that is not shuffled."""
    options = {"batch_size": 3, "tokenizer": byte_tokenizer(), "shuffle": False}
    streamed, table = module_class(stream(PAIRS), **options), module_class(PAIRS, **options)
    for module in (streamed, table):
        module.setup()
    for ours, theirs in zip(streamed.train_dataloader(), table.train_dataloader(), strict=False):
        assert ours.ids.tolist() == theirs.ids.tolist()
        for name, column in theirs.columns.items():
            found = ours[name]
            if isinstance(column, Ragged):
                assert found.equals(column)
            elif isinstance(column, torch.Tensor):
                assert torch.equal(found, column)
            else:
                assert found == column


def test_held_out_rows_next_to_a_stream_are_a_table() -> None:
    held_out = [{"prompt": "<held out>", "answer": 0}]
    seen = fit(prompts(stream(), val_data=held_out), max_steps=4, val_check_interval=2, num_sanity_val_steps=0)
    assert [entry[0] for entry in seen].count("held out") == 2
    data = prompts(stream(), val_data=held_out)
    module = Model()
    trainer().validate(module, data, verbose=False)
    assert module.seen == [("held out", ("<held out>",))]
    with pytest.raises(DataError, match="a stream cannot be tested on or predicted as a whole; give the rows without"):
        data.predict_dataloader()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"max_epochs": 2}, r"limit_train_batches=1.0 and max_steps=-1; give Trainer\(max_steps=...\)"),
        ({"max_steps": 8, "limit_train_batches": 0.5}, "limit_train_batches=0.5 and max_steps=8"),
    ],
)
def test_a_stream_without_a_number_of_steps_is_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(DataError, match=told):
        fit(prompts(stream()), **options)


def test_settings_that_need_all_rows_are_refused() -> None:
    with pytest.raises(DataError, match=r"val_fraction=0.1 needs all rows, which a stream does not have yet; leave"):
        prompts(stream(), val_fraction=0.1)
    with pytest.raises(DataError, match="bucket_batches=4 needs all rows"):
        prompts(DatasetSource("x/y", streaming=True), bucket_batches=4)
    with pytest.raises(DataError, match=r"val_data is a stream, but held-out rows are read whole; .* list\(stream"):
        prompts(ROWS, val_data=stream())
    with pytest.raises(DataError, match=r"was divided among ranks by split_dataset_by_node\(\); remove that call"):
        fit(prompts(split_dataset_by_node(stream(), rank=0, world_size=2)), max_steps=1)


def test_missing_columns_are_reported_before_the_first_step() -> None:
    with pytest.raises(
        DataError, match=r"row 0 of part 1 of 3 of the stream has no column 'question', only \['answer', 'prompt'\]"
    ):
        fit(prompts(stream(), prompt_column="question"), max_steps=1)
    long = [{"prompt": "x" * 9}, {"prompt": "x" * 99}]
    with pytest.raises(
        DataError, match="row 0 of part 2 of 2 of the stream has 99 tokens, and max_prompt_tokens allows 9"
    ):
        fit(prompts(stream(long), max_prompt_tokens=9), max_steps=1)


def learn_from_a_stream() -> tuple[list[Any], list[str]]:
    """Return every response of three iterations, and the prompts that this rank received."""
    handed: list[str] = []

    class Listening(runs.RecordedGRPO):
        def check_batch(self, batch: Samples) -> None:
            handed.extend(batch["prompt"])  # type: ignore[arg-type]

    models = {role: tiny_model("llama", vocab_size=259) for role in ("actor", "reference")}
    module = Listening(
        models["actor"], runs.low_tokens, reference=models["reference"], sampling=runs.SAMPLING, learning_rate=1e-2,
        tokenizer=byte_tokenizer(),
    )  # fmt: skip
    runs.trainer("realloc", runs.world_size(), max_steps=3, max_epochs=-1).fit(module, prompts(stream()))
    return module.tokens, handed


def test_every_rank_receives_the_same_batches(workers: WorkerPool) -> None:
    (alone, prompts_alone), *_ = workers.run(learn_from_a_stream, world_size=1, init_process_group=False)
    together = workers.run(learn_from_a_stream, world_size=2, init_process_group=False)
    assert len(prompts_alone) == 12
    for tokens, handed in together:
        assert handed == prompts_alone
        assert tokens == alone
