"""A LightningModule without calls trains data-parallel and reaches the weights of other strategies."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, StochasticWeightAveraging
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from lightning_realloc import ConfigError, ReallocStrategy
from lightning_realloc.errors import CheckpointError
from tests.devices import CPU_ALONE
from tests.strategies import runs
from tests.workers import WorkerPool

NUM_ROWS = 16


class Regression(L.LightningModule):
    """A small network with one unused parameter, and one that a single row uses."""

    def __init__(self, *, manual: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = not manual
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
        self.unused = nn.Parameter(torch.ones(2))
        self.rare = nn.Parameter(torch.ones(1))
        self.rows: list[int] = []

    def loss(self, rows: Tensor) -> Tensor:
        """Return the mean squared error; row 0 sees the rare parameter."""
        features = torch.stack([rows, rows.square() / NUM_ROWS, rows.cos()], dim=1).float()
        error = self.net(features)[:, 0] - rows.sin()
        if bool((rows == 0).any()):
            error = error + self.rare * (rows == 0)
        return error.square().mean()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
        """Count the rows, and return the loss or optimize manually."""
        self.rows += batch[0].tolist()
        loss = self.loss(batch[0])
        self.log("loss", loss, sync_dist=True, on_epoch=True, on_step=False)
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        self.manual_backward(loss)
        if batch_idx % 2:
            optimizer.step()
            optimizer.zero_grad()
        return None

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """Log the loss, averaged over ranks."""
        self.log("val/loss", self.loss(batch[0]), sync_dist=True, batch_size=len(batch[0]))

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Return the rows themselves."""
        return batch[0]

    def configure_optimizers(self) -> Any:
        """Return SGD with momentum and a schedule per epoch."""
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)]


def rows(batch_size: int) -> DataLoader[Any]:
    """Return a loader of the numbers 0 to 15."""
    return DataLoader(TensorDataset(torch.arange(NUM_ROWS)), batch_size=batch_size)


def fit(strategy: str, options: dict[str, Any], folder: str, *, manual: bool = False) -> dict[str, Any]:
    """Train for three epochs, each a single step over all rows, in two accumulated halves."""
    world_size = runs.world_size()
    module = Regression(manual=manual)
    # With manual optimization the module accumulates by itself.
    accumulate = {} if manual else {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05}
    checkpoint = ModelCheckpoint(dirpath=f"{folder}/{strategy}{world_size}{manual}", monitor="val/loss")
    trainer = runs.trainer(
        strategy, world_size, max_epochs=3, callbacks=[checkpoint, EarlyStopping("val/loss")],
        enable_checkpointing=True, **accumulate, **options,
    )  # fmt: skip
    loader = partial(rows, NUM_ROWS // 2 // world_size)
    trainer.fit(module, loader(), loader())
    seen, module.rows = module.rows, []
    (validated,) = trainer.validate(module, loader(), verbose=False)
    (tested,) = trainer.validate(ckpt_path="best", dataloaders=loader(), verbose=False)
    predicted = torch.cat(trainer.predict(module, loader())).tolist()
    return {
        "weights": {name: tensor.clone() for name, tensor in module.state_dict().items()},
        "seen": seen,
        "steps": trainer.global_step,
        "metrics": [validated["val/loss"], tested["val/loss"]],
        "predicted": predicted,
    }


@CPU_ALONE
@pytest.mark.parametrize("manual", [False, True], ids=["automatic", "by hand"])
def test_two_ranks_reach_the_weights_of_one_device(manual: bool, workers: WorkerPool, tmp_path: Any) -> None:
    run = partial(fit, folder=str(tmp_path), manual=manual)
    (single,) = workers.run(partial(run, "auto", {}), world_size=1, init_process_group=False)
    (alone,) = workers.run(partial(run, "realloc", {}), world_size=1, init_process_group=False)
    pair = workers.run(partial(run, "realloc", {}), world_size=2, init_process_group=False)
    start = Regression().state_dict()
    assert runs.largest_difference(single["weights"], start) > 0.01
    assert torch.equal(single["weights"]["unused"], start["unused"])
    assert not torch.equal(single["weights"]["rare"], start["rare"])
    for ours in (alone, *pair):
        assert runs.largest_difference(ours["weights"], single["weights"]) < 1e-6
        assert ours["steps"] == single["steps"] == 3
        assert ours["metrics"] == pytest.approx(single["metrics"], abs=1e-6)
    assert torch.equal(pair[0]["weights"]["net.0.weight"], pair[1]["weights"]["net.0.weight"])


def test_lightning_distributes_the_rows(workers: WorkerPool, tmp_path: Any) -> None:
    pair = workers.run(partial(fit, "realloc", {}, str(tmp_path)), world_size=2, init_process_group=False)
    # Three epochs of eight rows on each rank; together the ranks see every row once per epoch.
    assert [len(rank["seen"]) for rank in pair] == [24, 24]
    for epoch in range(3):
        part = slice(8 * epoch, 8 * epoch + 8)
        assert sorted(pair[0]["seen"][part] + pair[1]["seen"][part]) == list(range(NUM_ROWS))
    assert sorted(pair[0]["predicted"] + pair[1]["predicted"]) == list(range(NUM_ROWS))


def test_bf16_mixed_trains_a_plain_module(workers: WorkerPool, tmp_path: Any) -> None:
    run = partial(fit, "realloc", {"precision": "bf16-mixed"}, str(tmp_path))
    pair = workers.run(run, world_size=2, init_process_group=False)
    assert torch.equal(pair[0]["weights"]["net.0.weight"], pair[1]["weights"]["net.0.weight"])
    assert pair[0]["weights"]["net.0.weight"].dtype == torch.float32


def test_a_strategy_can_be_connected_without_a_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    strategy, module = ReallocStrategy(), Regression()
    strategy.connect(module)
    assert strategy.lightning_module is strategy.model is module and sys.excepthook is sys.__excepthook__
    refused = L.Trainer(accelerator="cpu", strategy=ReallocStrategy(), callbacks=[StochasticWeightAveraging(0.1)])
    algorithm = runs.sft()
    algorithm.trainer = refused
    with pytest.raises(ConfigError, match="StochasticWeightAveraging"):
        refused.strategy.connect(algorithm)
    assert sys.excepthook is not sys.__excepthook__, "a script ends with this error without Lightning's frames"


class KeywordIO(TorchCheckpointIO):
    """A CheckpointIO that takes storage options by name only, as some libraries' do."""

    def save_checkpoint(self, checkpoint: Any, path: Any, *, storage_options: Any = None) -> None:  # type: ignore[override]
        """Write the checkpoint with its options in it."""
        super().save_checkpoint({**checkpoint, "options": storage_options}, path)


class TwoOptimizers(Regression):
    """The network with an optimizer for each layer."""

    def __init__(self) -> None:
        super().__init__(manual=True)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """Step both optimizers."""
        self.manual_backward(self.loss(batch[0]))
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        """Return two optimizers."""
        return [torch.optim.SGD(self.net[layer].parameters(), lr=0.1) for layer in (0, 2)]


def saved_and_resumed(folder: str) -> tuple[Any, str]:
    """Return the storage options of a checkpoint, and the error of resuming it with fewer optimizers."""
    trainer = runs.trainer("realloc", 1, plugins=[KeywordIO()], max_steps=1)
    trainer.fit(TwoOptimizers(), rows(8))
    trainer.save_checkpoint(f"{folder}/two.ckpt", storage_options={"key": 1})
    stored = torch.load(f"{folder}/two.ckpt", weights_only=False)["options"]
    try:
        runs.trainer("realloc", 1, max_epochs=2).fit(Regression(manual=True), rows(8), ckpt_path=f"{folder}/two.ckpt")
    except CheckpointError as error:
        return stored, str(error)
    return stored, "not refused"


def test_checkpoints_keep_options_by_name_and_name_other_optimizers(workers: WorkerPool, tmp_path: Any) -> None:
    ((stored, said),) = workers.run(saved_and_resumed, str(tmp_path), world_size=1, init_process_group=False)
    assert stored == {"key": 1}
    assert "holds the states of 2 optimizers, and configure_optimizers() returned 1; resume with the optimizers" in said


class SelfSharded(Regression):
    """A module that divides its weights over the ranks by itself, or makes them on the meta device."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def configure_model(self) -> None:
        """Shard the network."""
        if self.how == "fsdp":
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])
        else:
            self.net.to("meta")


def refused_sharding(how: str) -> str:
    """Return the error of training a module that shards itself."""
    try:
        runs.trainer("realloc", runs.world_size()).fit(SelfSharded(how), rows(8))
    except ConfigError as error:
        return str(error)
    return "not refused"


@pytest.mark.parametrize(("how", "state"), [("fsdp", "divided over ranks"), ("meta", "on the meta device")])
def test_a_module_that_shards_itself_is_refused_on_every_rank(how: str, state: str, workers: WorkerPool) -> None:
    for said in workers.run(refused_sharding, how, world_size=2, init_process_group=False):
        assert said.startswith(f"net.0.weight is {state} after configure_model() of SelfSharded")
