from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_realloc.errors import LayoutError
from lightning_realloc.layout import Layout, ModelLayout
from lightning_realloc.runtime.forward.tp_group import TensorParallelGroup
from lightning_realloc.runtime.parallel.mesh import MeshRegistry
from lightning_realloc.runtime.parallel.model_spec import describe_model
from lightning_realloc.runtime.parallel.tensor_parallel import install_tensor_parallel, slice_parameters
from tests.models import SIZES, UNEVEN_HEADS, tiny_model
from tests.runtime.reference import local_part
from tests.workers import WorkerPool

PLAN = {
    "embedding": "embedding_colwise",
    "gate_up": "packed_colwise",
    "down": "rowwise",
    "left": "colwise",
    "right": "colwise",
    "join": "rowwise",
    "mixed": "packed_rowwise",
    "head": "colwise_gather_output",
    "last": "rowwise_split_input",
}


LATENT = {
    "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
    "first_k_dense_replace": 2, "n_group": 2, "topk_group": 1, "kv_lora_rank": 16, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8, "v_head_dim": 16,
}  # fmt: skip


class EveryStyle(nn.Module):
    """A model without a config, with styles that no tested family uses and sizes that 4 does not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 10)
        self.gate_up = nn.Linear(10, 2 * 7)
        self.down = nn.Linear(7, 10)
        self.left = nn.Linear(10, 6)
        self.right = nn.Linear(10, 6)
        self.join = nn.Linear(6, 10)
        self.fused = nn.Linear(10, 2 * 7)
        self.mixed = nn.Linear(2 * 7, 10)
        self.head = nn.Linear(10, 13)
        self.last = nn.Linear(13, 3)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embedding(ids)
        gate, up = self.gate_up(hidden).chunk(2, dim=-1)
        hidden = hidden + self.down(gate.sigmoid() * up)
        hidden = hidden + self.join(self.left(hidden.sin()) * self.right(hidden))  # two inputs, as in cross-attention
        hidden = hidden + self.mixed(self.fused(hidden).tanh())
        return self.last(self.head(hidden).relu())


def _tensor_parallel_group(text: str) -> tuple[Layout, dist.ProcessGroup]:
    meshes, layout = MeshRegistry("cpu"), Layout.parse(text)
    meshes.create([layout])
    group = meshes.group(layout, "tp")
    assert group is not None
    return layout, group


def _every_style(layout_text: str) -> list[str]:
    layout, group = _tensor_parallel_group(layout_text)
    rank = dist.get_rank()
    plan = {**PLAN, "fused": "packed_colwise"}
    torch.manual_seed(3)
    whole = EveryStyle().double()
    model = copy.deepcopy(whole)
    model_layout = ModelLayout(describe_model(model, tp_plan=plan), layout)
    install_tensor_parallel(model, layout, group, rank, tp_plan=plan)
    slice_parameters(model, model_layout, rank)
    ids = torch.arange(22).remainder(11).view(2, 11)
    outputs = [m(ids) for m in (whole, model)]
    for output in outputs:
        output.square().sum().backward()
    found = [] if torch.allclose(*outputs, rtol=1e-12) else ["output"]
    for name, parameter in model.named_parameters():
        expected = local_part(whole.get_parameter(name).grad, model_layout, name, rank)
        if not torch.allclose(parameter.grad, expected, rtol=1e-10, atol=1e-12):
            found.append(name)
    return found


@pytest.mark.parametrize("layout", ["tp4@0-3", "tp4@2,0,1,3"])
def test_every_style_gives_the_outputs_and_gradients_of_the_whole_model(workers: WorkerPool, layout: str) -> None:
    assert workers.run(_every_style, layout) == [[], [], [], []]


def _latent_attention(q_lora_rank: int | None, with_adapters: bool) -> list[str]:
    layout, group = _tensor_parallel_group("tp2@0-1")
    rank, sizes = dist.get_rank(), {**SIZES, **LATENT, "q_lora_rank": q_lora_rank}
    torch.manual_seed(3)
    whole: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model("deepseek_v2", **sizes)).double()
    if with_adapters:
        layers = ["kv_a_proj_with_mqa", "kv_b_proj", "q_proj", "o_proj"]
        whole = get_peft_model(whole, LoraConfig(r=4, target_modules=layers, init_lora_weights=False)).double()
    model = copy.deepcopy(whole)
    model_layout = ModelLayout(describe_model(model), layout)
    install_tensor_parallel(model, layout, group, rank)
    slice_parameters(model, model_layout, rank)
    cut = [name for name, _ in model.named_parameters() if "kv_b_proj" in name and "lora_A" not in name]
    assert all(2 * len(model.get_parameter(name)) == len(whole.get_parameter(name)) for name in cut)
    ids = torch.arange(22).view(2, 11)
    outputs = [m(input_ids=ids, use_cache=False).logits for m in (whole, model)]
    for output in outputs:
        output.square().sum().backward()
    found = [] if torch.allclose(*outputs, rtol=1e-6) else ["output"]  # rotary angles are in float32
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            expected = local_part(whole.get_parameter(name).grad, model_layout, name, rank)
            found += [] if torch.allclose(parameter.grad, expected, rtol=1e-5, atol=1e-7) else [name]
    return found


@pytest.mark.parametrize(("q_lora_rank", "with_adapters"), [(16, False), (None, True)])
def test_latents_are_whole_and_heads_are_cut(workers: WorkerPool, q_lora_rank: int | None, with_adapters: bool) -> None:
    assert workers.run(_latent_attention, q_lora_rank, with_adapters, world_size=2) == [[], []]


def _sums() -> dict[str, object]:
    layout, process_group = _tensor_parallel_group("tp4@3,1,0,2")
    group = TensorParallelGroup(process_group, layout.ranks, dist.get_rank())
    generator = torch.Generator().manual_seed(dist.get_rank())
    answers: dict[str, object] = {}
    for numel in (1_000, 200_000):  # gathered and added here; all-reduced by gloo
        for dtype in (torch.float32, torch.bfloat16):
            mine = torch.randn(numel, generator=generator).to(dtype)
            kept = mine.clone()
            total = group.sum(mine)
            answers[f"{numel} {dtype}"] = total.float()
            assert torch.equal(mine, kept)
            assert torch.equal(group.sum_without_gradient(mine.clone()), total)
    answers["order"] = group.gather(torch.tensor([dist.get_rank()])).flatten().tolist()
    return answers


def test_sums_have_the_same_bits_on_every_rank(workers: WorkerPool) -> None:
    first, *others = workers.run(_sums)

    assert first.pop("order") == [3, 1, 0, 2]
    for answers in others:
        assert all(torch.equal(answers[key], total) for key, total in first.items())


def _one_sum_for_q_k_and_v() -> tuple[int, int, bool]:
    layout, group = _tensor_parallel_group("tp2@0-1")
    model = tiny_model("llama")
    model_layout = ModelLayout(describe_model(model), layout)
    tensor_parallel = install_tensor_parallel(model, layout, group, dist.get_rank())
    slice_parameters(model, model_layout, dist.get_rank())
    calls, original = [0], tensor_parallel.sum

    def counted(tensor: Tensor) -> Tensor:
        calls[0] += 1
        return original(tensor)

    tensor_parallel.sum = counted  # type: ignore[method-assign]
    loss = model(input_ids=torch.arange(8).unsqueeze(0), labels=torch.arange(8).unsqueeze(0)).loss
    forward = calls[0]
    loss.backward()
    return forward, calls[0] - forward, tensor_parallel.shared_copy is None


def test_layers_that_share_an_activation_sum_its_gradient_once(workers: WorkerPool) -> None:
    # Forward: the embedding, and two sums in each of two blocks. Backward: q/k/v and gate/up in each, and the head.
    assert workers.run(_one_sum_for_q_k_and_v, world_size=2) == [(5, 5, True)] * 2


def _dropout(checkpointing: bool) -> tuple[Tensor, list[Tensor], Tensor]:
    """Return logits, gradients of replicated parameters, and the next random number, with dropout of heads."""
    layout, group = _tensor_parallel_group("tp2@0-1")
    model = get_peft_model(
        tiny_model("llama", **UNEVEN_HEADS["9/3"], attention_dropout=0.3),
        LoraConfig(target_modules="all-linear", lora_dropout=0.3, init_lora_weights=False),
    ).train()
    model_layout = ModelLayout(describe_model(model), layout)
    install_tensor_parallel(model, layout, group, dist.get_rank())
    slice_parameters(model, model_layout, dist.get_rank())
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    torch.manual_seed(5)
    output = model(input_ids=torch.arange(8).unsqueeze(0), labels=torch.arange(8).unsqueeze(0))
    following = torch.rand(1)
    output.loss.backward()
    cuts = {param.name: param.tensor_cut for param in model_layout.model.params}
    grads = [parameter.grad for name, parameter in model.named_parameters() if cuts[name] is None]
    return output.logits.detach(), [grad for grad in grads if grad is not None], following


@pytest.mark.parametrize("checkpointing", [False, True])
def test_dropout_of_unequal_numbers_of_heads_leaves_the_ranks_equal(workers: WorkerPool, checkpointing: bool) -> None:
    (logits, gradients, following), (others, other_gradients, other_following) = workers.run(
        _dropout, checkpointing, world_size=2
    )
    assert torch.equal(logits, others) and torch.equal(following, other_following)
    assert len(gradients) == 14  # in two blocks, A of five layers and B of two
    for one, other in zip(gradients, other_gradients, strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-7)


def test_recomputed_blocks_draw_the_same_dropout(workers: WorkerPool) -> None:
    (_, kept, _), (_, recomputed, _) = (workers.run(_dropout, again, world_size=2)[0] for again in (False, True))
    for one, other in zip(kept, recomputed, strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-7)


def _installed(case: str) -> str:
    layout, group = _tensor_parallel_group("tp2@0-1")
    reversed_layout = Layout.parse("tp2@1,0")
    model = tiny_model("gpt2" if case == "no plan" else "llama")
    if case == "wrapped":
        model.model.layers[0].mlp.up_proj.forward = model.model.layers[0].mlp.up_proj.forward
    with pytest.raises(LayoutError) as error:
        if case == "order":
            install_tensor_parallel(model, reversed_layout, group, dist.get_rank())
        elif case == "sliced twice":
            model_layout = ModelLayout(describe_model(model), layout)
            slice_parameters(model, model_layout, dist.get_rank())
            slice_parameters(model, model_layout, dist.get_rank())
        else:
            install_tensor_parallel(model, layout, group, dist.get_rank())
    return str(error.value)


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("no plan", "GPT2LMHeadModel has no tensor-parallel plan"),
        ("wrapped", "model.layers.0.mlp.up_proj: its forward was replaced"),
        ("order", "MeshRegistry, which keeps the layout's order"),
        ("sliced twice", "slice a model with full weights, once"),
    ],
)
def test_setups_that_would_compute_wrong_results_are_refused(workers: WorkerPool, case: str, reason: str) -> None:
    for message in workers.run(_installed, case, world_size=2):
        assert reason in message
