"""Images have the patches and tokens of transformers' processors, and towers the bytes and seconds of their sizes."""

from __future__ import annotations

import importlib
import random
import re
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest
from transformers import LlavaOnevisionConfig
from transformers.models.llava_onevision.modeling_llava_onevision import image_size_to_num_patches
from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor

from lightning_realloc.algorithms.base.role import Role
from lightning_realloc.dataflow.execution_plan import CallPlan, ExecutionPlan
from lightning_realloc.errors import PlanError
from lightning_realloc.layout.cluster import ClusterSpec
from lightning_realloc.layout.dims import Layout
from lightning_realloc.report.known_models import find_known_model
from lightning_realloc.runtime.model.image_inputs import IMAGE_FAMILIES
from lightning_realloc.runtime.model.structure import TrainVision, vision_parts
from lightning_realloc.strategies.pool.memory_check import describe_roles
from lightning_realloc.tuning.estimate.roofline import RooflineEstimator
from lightning_realloc.tuning.memory.forecast import forecast_memory
from lightning_realloc.tuning.memory.parts import MemoryParts, MemorySettings, Workload
from lightning_realloc.tuning.shapes.images import ImagesPerPrompt, is_of_tower, vision_params
from lightning_realloc.tuning.shapes.model_shape import ModelShape
from lightning_realloc.tuning.shapes.role_elements import elements_of
from lightning_realloc.tuning.shapes.role_memory import RoleMemory
from lightning_realloc.tuning.shapes.tower import Tower
from tests.tuning.estimate.test_hardware import IDEAL
from tests.tuning.examples import role_of
from tests.tuning.memory.test_forecast import FLOW
from tests.vision_models import VISION_FAMILIES, tiny_vision_model, vision_config

BLOCKS = ModelShape(
    num_layers=2, hidden=8, intermediate=16, num_heads=1, num_kv_heads=1, head_dim=8, num_outputs=1, gated=False,
    rms_norm=False,
)  # fmt: skip
SIZES = [(768, 1024), (1024, 768), (500, 500), (30, 40), (4000, 3000), (100, 1999), (2000, 333)]
SIZES += [
    (generator.randint(20, 3000), generator.randint(20, 3000)) for generator in [random.Random(0)] for _ in range(150)
]
QWEN_VL = "Qwen/Qwen2.5-VL-7B-Instruct"


def tower(family: str, patch: int, merge: int, **further: Any) -> Tower:
    return Tower(family=family, blocks=BLOCKS, patch=patch, merge=merge, **further)


def processor(module: str, name: str, **settings: Any) -> Any:
    """Return an image processor of transformers."""
    return getattr(importlib.import_module(f"transformers.models.{module}"), name)(**settings)


def same_for_all_sizes(own: Tower, theirs: Callable[[int, int], tuple[int, int]]) -> None:
    """Check patches and tokens of images of many sizes, with other numbers of images."""
    for height, width in SIZES:
        read = own.read(height, width, count=3)
        assert (read.num_patches, read.tokens) == tuple(3 * part for part in theirs(height, width)), (height, width)


@pytest.mark.parametrize(
    ("family", "patch", "least", "most"),
    [("qwen2_5_vl", 14, 56 * 56, 12_845_056), ("qwen3_vl", 16, 65_536, 16_777_216)],
)
def test_qwen_reads_images_in_about_their_own_size(family: str, patch: int, least: int, most: int) -> None:
    size = {"shortest_edge": least, "longest_edge": most}
    module, name = "qwen2_vl.image_processing_pil_qwen2_vl", "Qwen2VLImageProcessorPil"
    theirs = processor(module, name, patch_size=patch, merge_size=2, size=size)

    def expected(height: int, width: int) -> tuple[int, int]:
        patches = theirs.get_number_of_image_patches(height, width)
        return patches, patches // 4

    same_for_all_sizes(tower(family, patch, 2), expected)
    with pytest.raises(PlanError, match="over 200 times"):
        tower(family, patch, 2).read(10, 3000)


def test_smolvlm_cuts_enlarged_images_into_squares() -> None:
    sizes = {"size": {"longest_edge": 2048}, "max_image_size": {"longest_edge": 512}}
    theirs = processor("idefics3.image_processing_pil_idefics3", "Idefics3ImageProcessorPil", **sizes)

    def expected(height: int, width: int) -> tuple[int, int]:
        parts, rows, columns = theirs.get_number_of_image_patches(height, width)
        # `_get_num_multimodal_tokens` of the processor, with 64 tokens of a square.
        return parts * 32**2, 64 + 3 + rows * ((64 + 2) * columns + 1)

    same_for_all_sizes(tower("smolvlm", 16, 4, side=512), expected)


def test_internvl_cuts_images_into_a_grid_of_their_shape() -> None:
    size = {"height": 448, "width": 448}
    module, name = "got_ocr2.image_processing_pil_got_ocr2", "GotOcr2ImageProcessorPil"
    theirs = processor(module, name, size=size, crop_to_patches=True)

    def expected(height: int, width: int) -> tuple[int, int]:
        parts = theirs.get_number_of_image_patches(height, width)
        return parts * (32**2 + 1), parts * 256 + 2

    same_for_all_sizes(tower("internvl", 14, 2, side=448, num_extra=1), expected)


def test_mistral_reads_images_up_to_a_longest_edge() -> None:
    module = importlib.import_module("transformers.models.pixtral.image_processing_pil_pixtral")

    def expected(height: int, width: int) -> tuple[int, int]:
        image = np.zeros((height, width, 3), dtype=np.uint8)
        rows, columns = module.get_resize_output_image_size(image, size=(1540, 1540), patch_size=(28, 28))
        return rows // 14 * (columns // 14), rows // 28 * (columns // 28 + 1)

    same_for_all_sizes(tower("mistral3", 14, 2, side=1540), expected)


def test_llava_onevision_fits_images_into_known_sizes() -> None:
    sizes = LlavaOnevisionConfig().image_grid_pinpoints
    theirs: Any = SimpleNamespace(
        image_processor=SimpleNamespace(image_grid_pinpoints=sizes), num_image_tokens=27**2,
        vision_aspect_ratio="anyres_max_9",
    )  # fmt: skip
    theirs._get_unpadded_features = lambda *size: LlavaOnevisionProcessor._get_unpadded_features(theirs, *size)

    def expected(height: int, width: int) -> tuple[int, int]:
        parts = image_size_to_num_patches((height, width), sizes, 384)
        return parts * 27**2, LlavaOnevisionProcessor._get_number_of_features(theirs, height, width, 384, 384)

    same_for_all_sizes(tower("llava_onevision", 14, 1, side=384, sizes=tuple(map(tuple, sizes))), expected)


@pytest.mark.parametrize(
    ("name", "patches", "tokens"),
    [
        (QWEN_VL, 74 * 54, 37 * 27),  # 1036 x 756
        ("Qwen/Qwen3-VL-8B-Instruct", 64 * 48, 32 * 24),
        ("google/gemma-3-27b-it", 64**2, 256 + 4),
        ("OpenGVLab/InternVL3-8B-hf", 13 * (32**2 + 1), 13 * 256 + 2),  # a grid of 4 x 3, and the whole image
        ("HuggingFaceTB/SmolVLM2-2.2B-Instruct", 13 * 27**2, 3 * (4 * (81 + 2) + 1) + 81 + 3),
        ("llava-hf/llava-1.5-7b-hf", 24**2 + 1, 24**2),
    ],
)
def test_built_in_models_read_an_image(name: str, patches: int, tokens: int) -> None:
    own = role_of(name).tower
    assert own is not None
    read = own.read(768, 1024)
    assert (read.num_patches, read.tokens) == (patches, tokens)


def test_towers_of_all_families_are_read_from_config_and_parameters() -> None:
    assert set(VISION_FAMILIES) == IMAGE_FAMILIES
    for family in VISION_FAMILIES:
        role = described(family)
        assert role.tower is not None, family
        blocks, names = role.tower.blocks, [param.name for param in vision_params(role.model)]
        model = tiny_vision_model(family)
        expected = {
            name for name, _ in model.named_parameters() if "language_model" not in name and "text_model" not in name
        }
        assert set(names) == expected - {"lm_head.weight"}, family
        assert (blocks.num_layers, blocks.hidden, blocks.num_heads, blocks.intermediate) == (
            2, 32, 4, 64 if family == "qwen2_vl" else 48,
        ), family  # fmt: skip
        # Matrices of the blocks: 4 of attention, 2 or 3 of the MLP; further ones embed positions.
        inside = 2 * 32 * (4 * 32 + (3 if blocks.gated else 2) * blocks.intermediate)
        found = (
            sum(
                p.numel
                for p in vision_params(role.model)
                if len(p.shape) == 2 and not re.search("embed|\\.head\\.", p.name)
            )
            - inside
        )
        assert role.tower.projector == found > 0, family
    assert described("qwen2_5_vl").tower.blocks.gated and described("qwen2_5_vl").tower.blocks.rms_norm  # type: ignore[union-attr]
    assert not described("gemma3").tower.blocks.gated and not described("gemma3").tower.blocks.rms_norm  # type: ignore[union-attr]


def described(family: str, *, frozen: str = "") -> RoleMemory:
    """Return a tiny model as a role; with ``frozen``, without gradients of parts for images."""
    role = describe_roles([Role(name="any", source=tiny_vision_model(family), trained=True)], {})["any"]
    vision = vision_params(role.model)
    names = {p.name for p in vision if frozen == "all" or (frozen == "tower" and is_of_tower(p))}
    return replace(role, frozen_params=frozenset(names))


def test_a_tower_is_trained_unless_all_of_it_before_the_projector_is_frozen() -> None:
    assert described("qwen2_5_vl").trained_vision == "tower"
    assert described("qwen2_5_vl", frozen="tower").trained_vision == "projector"
    assert described("qwen2_5_vl", frozen="all").trained_vision is None
    assert described("qwen2_5_vl", frozen="all").trained_share == 1.0  # of the language model


LOAD = Workload(
    num_sequences=8, prompt_tokens=100, response_tokens=20, micro_batch_tokens=240, samples_per_prompt=4,
    images=ImagesPerPrompt(num_parts=2, part_patches=128, tokens=64),
)  # fmt: skip


def activations(role: RoleMemory, call: str, layout: str, load: Workload = LOAD, **options: Any) -> list[MemoryParts]:
    entries: dict[str, Any] = {name: layout for name in ("actor.generate", "reference.infer", "actor.train")}
    entries[call] = {"layout": layout, **options}
    plan = ExecutionPlan.from_mapping({"calls": entries})
    ranks = range(Layout.parse(layout).dims.size)
    roles = {"actor": role, "reference": role}
    found = forecast_memory(FLOW, plan, roles, MemorySettings(), load, ranks=ranks)
    return [found.at(call, rank) for rank in ranks]


def test_a_trained_tower_keeps_activations_and_a_frozen_one_keeps_none() -> None:
    trained, frozen = described("gemma3"), described("gemma3", frozen="all")
    assert trained.tower is not None
    # Two sequences of a micro-batch have 512 patches, each in fp32: pixels of 3 x 4 x 4, and two blocks.
    pixels, patches = 512 * 3 * 16 * 4, 512
    saved = patches * 2 * trained.tower.blocks.saved_bytes(1, 4)
    # The projector keeps its input twice, and one of 32 features for each of 128 tokens.
    saved += 4 * (2 * patches * 32 + 128 * 32)
    for call in ("reference.infer", "actor.generate"):
        with_images = activations(frozen, call, "dp1")[0].activations
        # All prompts of a generation are read in one step: two; the tower's own pass is the largest moment.
        assert with_images == pixels + patches * trained.tower.blocks.working_elements(1) * 4
        assert with_images == activations(trained, call, "dp1")[0].activations
    text = replace(LOAD, images=None)
    own, without = activations(trained, "actor.train", "dp1")[0], activations(trained, "actor.train", "dp1", text)[0]
    assert own.gradients == without.gradients
    assert own.activations == without.activations + pixels + saved
    fewer = activations(trained, "actor.train", "dp1", gradient_checkpointing=True)[0].activations
    assert fewer < own.activations
    assert activations(frozen, "actor.train", "dp1")[0].optimizer < own.optimizer


def test_the_first_stage_reads_images_and_all_hold_pixels() -> None:
    role = described("gemma3", frozen="all")
    first, last = (parts.activations for parts in activations(role, "reference.infer", "pp2"))
    alone = activations(role, "reference.infer", "dp1")[0].activations
    text = [parts.activations for parts in activations(role, "reference.infer", "pp2", replace(LOAD, images=None))]
    pixels = 4 * 512 * 3 * 16 * 4  # of four micro-batches
    assert last - text[1] == pixels and first == alone + pixels * 3 // 4


@pytest.mark.parametrize("layout", ["tp2", "fsdp2", "dp2"])
def test_ranks_hold_whole_towers_unless_fsdp_shards_them(layout: str) -> None:
    role = described("gemma3")
    total = sum(param.numel for param in vision_params(role.model))
    whole, cut = (elements_of(role).on_rank(Layout.parse(text), 0) for text in ("dp1", layout))
    assert whole.root - total == pytest.approx(128 * 64 * 2 + 64)  # embedding, head, last norm
    if layout == "fsdp2":
        assert cut.num_sharded == pytest.approx(whole.num_sharded / 2, rel=0.01)
    else:
        assert cut.num_sharded - total >= (whole.num_sharded - total) / 2


def seconds(call: str, layout: str, load: Workload, role: RoleMemory) -> float:
    cluster = replace(ClusterSpec.parse("h100:1x8"), device_memory_bytes_per_s=1e18, host_bytes_per_s=1e18)
    roles = {"actor": role, "reference": role}
    settings = MemorySettings(copy_bytes=2, gathered_bytes=2)
    answers = RooflineEstimator(FLOW, cluster, roles, settings, load, efficiency=IDEAL)
    return answers.call_seconds(call, CallPlan(Layout.parse(layout))).total


def test_images_take_the_flops_of_their_patches_once_a_prompt_in_generation() -> None:
    role = role_of(QWEN_VL)
    load = Workload(
        num_sequences=16, prompt_tokens=1500, response_tokens=8, samples_per_prompt=8, micro_batch_tokens=1508
    )
    images = ImagesPerPrompt(num_parts=1, part_patches=3996, tokens=999)
    with_images = replace(load, images=images)
    flops = ClusterSpec.parse("h100:1x8").device_flops
    # A patch meets the matrices of 32 blocks, and attends to 64 patches in 28 of them, else to all.
    products = 2 * 32 * 3996 * (4 * 1280**2 + 3 * 1280 * 3420)
    attention = 4 * 3996 * 1280 * (28 * 64 + 4 * 3996)
    projector = 2 * 999 * (5120**2 + 5120 * 3584)
    one = (products + attention + projector) / flops
    for call, prompts in (("actor.generate", 2), ("reference.infer", 16)):
        more = seconds(call, "dp1", with_images, role) - seconds(call, "dp1", load, role)
        assert more == pytest.approx(prompts * one, rel=0.02)
    # A frozen tower has no backward pass; a trained one has twice the products and 2.5 times the attention.
    training = seconds("actor.train", "dp1", with_images, role) - seconds("actor.train", "dp1", load, role)
    assert training == pytest.approx(16 * one, rel=0.02)
    trained = replace(role, frozen_params=frozenset())
    training = seconds("actor.train", "dp1", with_images, trained) - seconds("actor.train", "dp1", load, trained)
    again = (3 * (products + projector) + 3.5 * attention) / flops
    assert training == pytest.approx(16 * again, rel=0.02)
    # Tensor-parallel ranks compute all of it; replicas divide the prompts.
    for layout, share in (("tp4", 1), ("dp4", 4)):
        more = seconds("reference.infer", layout, with_images, role) - seconds("reference.infer", layout, load, role)
        assert more == pytest.approx(16 * one / share, rel=0.02)


def test_the_mean_of_images_has_their_patches_and_pairs_of_patches() -> None:
    # Parts of 100 and 300 patches in one prompt of two: 400 patches, and 100 x 100 and 300 x 300 pairs of them.
    mean = ImagesPerPrompt.mean([ImagesPerPrompt.from_parts((100, 300), tokens=50)], 2)
    assert mean.num_patches == pytest.approx(200) and mean.tokens == pytest.approx(25)
    assert mean.num_parts * mean.part_patches**2 == pytest.approx((100**2 + 300**2) / 2)


@pytest.mark.parametrize("family", sorted(VISION_FAMILIES))
def test_trained_parts_of_images_have_gradients_and_optimizer_state(family: str) -> None:
    """In bytes of a training call on one rank, of three settings of ``train_vision``."""
    config, found = vision_config(family), dict[str, MemoryParts]()
    model = tiny_vision_model(family)
    parts = vision_parts(model)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    for trained in get_args(TrainVision):
        role = Role(name="any", source=config, trained=True, train_vision=trained)
        found[trained] = activations(describe_roles([role], {})["any"], "actor.train", "dp1")[0]
    text = sum(size for name, size in sizes.items() if name not in parts)
    projector = sum(size for name, size in sizes.items() if parts.get(name) == "projector")
    tower = sum(size for name, size in sizes.items() if parts.get(name) == "tower")
    assert projector > 0 and tower > 0
    expected = {"none": text, "projector": text + projector, "all": text + projector + tower}
    assert {name: bytes_.optimizer for name, bytes_ in found.items()} == {n: 8 * size for n, size in expected.items()}
    # fp32 gradients; at the peak of activations, those of the last blocks may be missing.
    assert found["none"].gradients <= found["projector"].gradients <= found["all"].gradients
    assert found["none"].activations < found["projector"].activations < found["all"].activations


@pytest.mark.parametrize("trains", ["none", "all"])
def test_pipeline_stages_count_the_passes_of_the_tower(trains: TrainVision) -> None:
    """The first stage has as many blocks as make an optimizer step shortest, with and without images."""
    config = find_known_model(QWEN_VL)
    role = describe_roles([Role(name="actor", source=config, trained=True, train_vision=trains)], {})["actor"]
    images = ImagesPerPrompt(num_parts=1, part_patches=3996, tokens=999)
    load = Workload(num_sequences=64, prompt_tokens=1100, response_tokens=400, micro_batch_tokens=1500)
    for shown in (None, images):
        chosen = role.with_images(shown, load.longest, is_trained=True)
        took = {}
        for cost in {0, chosen.model.costs[0], *(count * role.model.costs[1] for count in range(2, 40, 2))}:
            moved = replace(role, model=replace(role.model, costs=(cost, *role.model.costs[1:])))
            first = len(moved.model.stage_blocks(4)[0])
            took[first] = seconds("actor.train", "pp4", replace(load, images=shown), moved)
        first = len(chosen.model.stage_blocks(4)[0])
        assert took[first] <= 1.02 * min(took.values()), (first, took)
        assert first == 8 if shown is None else first < 8, first


def test_images_of_no_pixels_and_no_patches_are_refused() -> None:
    with pytest.raises(PlanError, match="0 images of 10x20 pixels"):
        tower("gemma3", 14, 4, side=896).read(20, 10, count=0)
    with pytest.raises(PlanError, match="part_patches=0"):
        ImagesPerPrompt(num_parts=1, part_patches=0, tokens=1)
