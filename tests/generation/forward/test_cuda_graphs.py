"""Replayed steps compute the same as the model. Without CUDA, the tests' "graph" runs its work again."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lightning_realloc.generation import Completion, GenerationEngine, SamplingParams, Speculation, engine_parts
from lightning_realloc.generation.cache.kv_cache import SlotCache
from lightning_realloc.generation.core.step import DecodeRow, PrefillChunk
from lightning_realloc.generation.forward.attention import slot_attention
from lightning_realloc.generation.forward.cuda_graphs import StepGraphs, state_of
from lightning_realloc.generation.forward.runner import ModelRunner
from lightning_realloc.generation.forward.step_shapes import StepShape, filled_up, rounded_up
from lightning_realloc.generation.schedule.waiting import PrefillBatching
from lightning_realloc.generation.speculative import draft_model as draft_model_module
from tests.generation.test_engine import draw_prompts, tokens_of
from tests.matrices import crossed, matrix
from tests.models import tiny_model

SAMPLED = SamplingParams(max_new_tokens=40, n=2, seed=3, ignore_eos=True)
LIMITS = [3, 26, 8, 17, 5, 21, 12]
FEW_LIMITS = [2, 14, 5, 9, 4]
"""Limits of runs that only have to capture, replay or fail."""


class Recorder:
    """Stand-in for CUDA that counts captures and replays."""

    def __init__(self) -> None:
        self.num_captured = self.num_replayed = 0

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        self.num_captured += 1

        def replay() -> None:
            self.num_replayed += 1
            work()

        return replay


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """Make new engines capture on CPU."""
    recorder = Recorder()
    captured = partial(StepGraphs, make_record=lambda: recorder, device_type="cpu")
    for module in (engine_parts, draft_model_module):
        monkeypatch.setattr(module, "StepGraphs", captured)
    return recorder


def generate(engine: GenerationEngine, limits: list[int] = LIMITS) -> list[Completion]:
    return engine.generate(draw_prompts(len(limits)), SAMPLED, token_limits=limits)


@cache
def plain(family: str) -> list[Completion]:
    """Return the completions of the family's tiny model without graphs."""
    return generate(GenerationEngine(tiny_model(family), max_slots=5, cuda_graphs=False))


@given(number=st.integers(1, 5000), per_octave=st.sampled_from([1, 2, 4]))
def test_few_rounded_sizes_cover_all_sizes_with_little_padding(number: int, per_octave: int) -> None:
    rounded = rounded_up(number, per_octave)
    assert number <= rounded < number * (1 + 1 / per_octave)
    assert rounded_up(rounded, per_octave) == rounded
    sizes = {rounded_up(n, per_octave) for n in range(1, 1025)}
    assert len(sizes) <= 10 * per_octave + 1


@given(
    larger=st.builds(StepShape, st.integers(1, 64), st.integers(1, 8), st.sampled_from([128, 192, 256])),
    smaller=st.builds(StepShape, st.integers(1, 64), st.integers(1, 8), st.sampled_from([128, 192, 256])),
)
def test_a_shape_covers_smaller_ones_only_if_they_cost_nearly_as_much(larger: StepShape, smaller: StepShape) -> None:
    assert larger.covers(larger)
    if larger.covers(smaller):
        assert larger == tuple(map(max, larger, smaller))
        assert larger.num_tokens - smaller.num_tokens <= 0.25 * (256 + smaller.num_tokens)
        assert larger.length <= 2 * smaller.length


@given(data=st.data(), capacity=st.integers(20, 50), width=st.integers(1, 5))
def test_padding_of_a_shape_is_written_to_positions_of_no_sample(
    data: st.DataObject, capacity: int, width: int
) -> None:
    count = st.integers(1, width)
    row = st.builds(lambda n, at: DecodeRow(list(range(1, n + 1)), at), count, st.integers(0, capacity - width - 1))
    rows = data.draw(st.lists(row, max_size=6))
    shape = StepShape(len(rows) + data.draw(st.integers(0, 3)), width, capacity)
    cache = SlotCache()
    cache.capacity = capacity
    ids, positions, places, shifted = filled_up(rows, shape, cache)
    assert shifted == positions, "no row has read an image"
    assert {len(ids), len(positions), len(places)} == {shape.rows * width}
    own = {slot * width + place for slot, row in enumerate(rows) for place in range(len(row.tokens))}
    for index, (token, position, place) in enumerate(zip(ids, positions, places, strict=True)):
        slot = index // width
        if index in own:
            assert token == index % width + 1
            assert place == slot * capacity + position < (slot + 1) * capacity - 1
            assert position == rows[slot].position + index % width
        else:
            assert (token, position, place) == (0, 0, (slot + 1) * capacity - 1)


@pytest.mark.parametrize(
    ("family", "drafter"), crossed(["llama", "minicpm3", "gpt2"], [None, "ngram", "history", "model", "blocks"])
)
def test_replayed_steps_draw_the_same_tokens(recorder: Recorder, family: str, drafter: str | None) -> None:
    model = tiny_model(family)
    speculation = None
    if drafter is not None:
        own = {"model": {"draft_model": tiny_model(family)}, "blocks": {"draft_blocks": 1}}.get(drafter, {})
        speculation = Speculation(drafter=drafter, num_draft_tokens=3, **own)  # type: ignore[arg-type]
    engine = GenerationEngine(model, max_slots=5, speculation=speculation)
    for _ in range(2):
        completions = generate(engine)
        assert tokens_of(completions) == tokens_of(plain(family))
        for one, other in zip(completions, plain(family), strict=True):
            torch.testing.assert_close(
                torch.tensor(one.logprobs), torch.tensor(other.logprobs), atol=1e-5, rtol=0, check_dtype=False
            )
    assert recorder.num_replayed > engine.stats.num_steps / 2
    assert recorder.num_captured < recorder.num_replayed / 2


@pytest.mark.parametrize(
    ("max_cache_bytes", "drafter"),
    matrix(itertools.product([40_000, 200_000], [None, "ngram", "blocks"]), (200_000, "ngram"), (40_000, "blocks")),
)
def test_replayed_steps_read_pages_that_change(
    recorder: Recorder, drafter: Literal["ngram", "blocks"] | None, max_cache_bytes: int
) -> None:
    model = tiny_model("llama")
    blocks = 1 if drafter == "blocks" else None
    speculation = None if drafter is None else Speculation(drafter=drafter, draft_blocks=blocks, num_draft_tokens=3)
    engine = GenerationEngine(model, max_slots=5, speculation=speculation, max_cache_bytes=max_cache_bytes)
    for _ in range(2):
        assert tokens_of(generate(engine)) == tokens_of(plain("llama"))
        assert engine.stats.cache_bytes <= max_cache_bytes
    assert recorder.num_replayed > engine.stats.num_steps
    assert engine._graphs is not None
    kept = dict(engine._graphs._graphs)
    generate(engine)
    # Pages and table stay where they are.
    assert all(engine._graphs._graphs[shape] is graph for shape, graph in kept.items())


@pytest.mark.parametrize(
    ("family", "backend"),
    [
        ("gemma2", "eager"),
        pytest.param("llama", "eager", marks=pytest.mark.exhaustive),
        pytest.param("qwen3", "inductor", marks=pytest.mark.inductor),
    ],
)
def test_compiled_steps_draw_the_same_tokens_with_few_programs(recorder: Recorder, family: str, backend: str) -> None:
    torch._dynamo.reset()
    model = tiny_model(family)
    engine = GenerationEngine(model, max_slots=5, compile=backend)
    programs = []
    for _ in range(2):
        assert tokens_of(generate(engine)) == tokens_of(plain(family))
        programs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert 0 < programs[0] == programs[1] <= 12, "one program serves all layers, sizes and generations"
    assert recorder.num_replayed > engine.stats.num_steps / 2
    with torch.no_grad():  # other weights in the same place need no new program
        for parameter in model.parameters():
            parameter.mul_(0.9)
    changed = generate(GenerationEngine(model, max_slots=5, cuda_graphs=False))
    assert tokens_of(generate(engine)) == tokens_of(changed)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == programs[0]


def test_a_block_that_cannot_be_compiled_runs_as_it_is_and_is_named_once(
    recorder: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("no compiler here")

    torch._dynamo.reset()
    model = tiny_model("llama")
    with caplog.at_level(logging.WARNING):
        made = generate(GenerationEngine(model, max_slots=5, compile=broken))  # type: ignore[arg-type]
    assert tokens_of(made) == tokens_of(plain("llama")) and recorder.num_replayed
    said = [record.getMessage() for record in caplog.records if "cannot be compiled" in record.getMessage()]
    assert len(said) == 1 and "no compiler here" in said[0]


def test_models_with_a_sliding_window_in_their_mask_are_captured_within_it(recorder: Recorder) -> None:
    model = tiny_model("mistral", sliding_window=48)
    uncaptured = generate(GenerationEngine(model, cuda_graphs=False))
    assert tokens_of(generate(GenerationEngine(model))) == tokens_of(uncaptured)
    assert recorder.num_replayed


def test_samples_that_end_at_the_end_of_the_context_keep_their_last_position(recorder: Recorder) -> None:
    model = tiny_model("gpt2")  # it has 128 positions
    params = SamplingParams(max_new_tokens=200, seed=1, ignore_eos=True)
    prompts = [[5] * 30, [7] * 100]
    uncaptured = GenerationEngine(model, cuda_graphs=False).generate(prompts, params)
    replayed = GenerationEngine(model, speculation=Speculation(drafter="ngram", num_draft_tokens=4)).generate(
        prompts, params
    )
    assert [len(completion.token_ids) for completion in uncaptured] == [98, 28]
    assert tokens_of(replayed) == tokens_of(uncaptured)


def test_graphs_outlive_a_generation_and_moved_memory_is_captured_again(recorder: Recorder) -> None:
    model = tiny_model("llama")
    engine = GenerationEngine(model, max_slots=4)
    generate(engine, FEW_LIMITS)
    assert engine.stats.capture_s > 0
    for _ in range(2):  # which capture shapes that came once before
        generate(engine, FEW_LIMITS)
    settled = recorder.num_captured
    generate(engine, FEW_LIMITS)
    assert recorder.num_captured == settled
    assert engine.stats.capture_s == 0

    engine.release()  # the cache gets new memory
    generate(engine, FEW_LIMITS)
    assert recorder.num_captured > settled

    settled = recorder.num_captured
    norm = model.get_submodule("model.norm")
    norm.weight.data = norm.weight.data.clone()
    generate(engine, FEW_LIMITS)
    assert recorder.num_captured > settled


def test_every_change_of_a_models_kernel_launches_changes_its_state() -> None:
    model = tiny_model("llama")
    layer = model.get_submodule("model.layers.0.mlp.up_proj")
    states = [state_of(model)]
    assert state_of(model.train()) == state_of(model.eval()) == states[0]
    with torch.no_grad():
        layer.weight.add_(1.0)  # a replay reads the current numbers
    assert state_of(model) == states[0]

    handle = layer.register_forward_hook(lambda module, args, output: output)
    states.append(state_of(model))
    handle.remove()
    assert state_of(model) == states[0]
    layer.switch = {"merged": [True]}
    states.append(state_of(model))
    layer.switch["merged"][0] = False
    states.append(state_of(model))
    layer.weight = nn.Parameter(layer.weight.detach().clone())
    states.append(state_of(model))
    assert len(set(states)) == len(states)


def test_a_model_that_cannot_be_captured_runs_without_graphs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def record(work: Callable[[], None]) -> Callable[[], None]:
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    monkeypatch.setattr(engine_parts, "StepGraphs", partial(StepGraphs, make_record=lambda: record, device_type="cpu"))
    model = tiny_model("llama")
    engine = GenerationEngine(model)
    with caplog.at_level(logging.WARNING):
        completions = [generate(engine) for _ in range(2)]
    assert all(tokens_of(each) == tokens_of(plain("llama")) for each in completions)
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "LlamaForCausalLM cannot be captured as a CUDA graph" in warning
    assert warning.endswith("not permitted when stream is capturing")


@pytest.mark.parametrize("is_hidden", [False, True])
def test_a_capture_without_memory_is_tried_again_in_the_next_generation(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_hidden: bool
) -> None:
    recorder, is_full = Recorder(), True

    def record(work: Callable[[], None]) -> Callable[[], None]:
        if not is_full:
            return recorder(work)
        try:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")
        finally:
            if is_hidden:
                raise RuntimeError("the capture was invalidated")

    monkeypatch.setattr(engine_parts, "StepGraphs", partial(StepGraphs, make_record=lambda: record, device_type="cpu"))
    model = tiny_model("llama")
    engine = GenerationEngine(model)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert tokens_of(generate(engine)) == tokens_of(plain("llama"))
        is_full = False
        assert recorder.num_replayed == 0
        assert tokens_of(generate(engine)) == tokens_of(plain("llama"))
    assert recorder.num_replayed > 0
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "memory ran out while a decoding step of LlamaForCausalLM was captured" in warning
    assert "lower max_slots" in warning


def test_prefills_are_deferred_until_idle_slots_cost_as_much_as_one() -> None:
    refill = PrefillBatching()
    assert not refill.should_defer(num_running=0, num_free=4), "nothing would be done meanwhile"
    for _ in range(2):
        waited = [refill.should_defer(num_running=3, num_free=1) for _ in range(12)]
        assert waited == [True] * 11 + [False]  # a quarter of a step is idle each time, and reading costs three steps
    assert [refill.should_defer(num_running=1, num_free=3) for _ in range(4)] == [True] * 3 + [False]


def num_steps_with_prompts(monkeypatch: pytest.MonkeyPatch, *, cuda_graphs: bool) -> int:
    """Generate 96 responses of ragged lengths in 16 slots; return the number of steps that read prompts."""
    num_prefills = []
    forward = ModelRunner.forward

    def noted(self: ModelRunner, prefills: Sequence[PrefillChunk], rows: Sequence[DecodeRow]) -> torch.Tensor:
        num_prefills.append(len(prefills))
        return forward(self, prefills, rows)

    monkeypatch.setattr(ModelRunner, "forward", noted)
    limits = [8 + 5 * (index % 7) for index in range(48)]
    engine = GenerationEngine(tiny_model("llama"), max_slots=16, cuda_graphs=cuda_graphs)
    completions = engine.generate([[5, 6, 7]] * 48, SAMPLED, token_limits=limits)
    monkeypatch.setattr(ModelRunner, "forward", forward)
    assert [len(completion.token_ids) for completion in completions] == [limit for limit in limits for _ in range(2)]
    return sum(count > 0 for count in num_prefills)


def test_prompts_are_prefilled_several_at_a_time_where_steps_are_replayed(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    replayed, plain = (num_steps_with_prompts(monkeypatch, cuda_graphs=graphs) for graphs in (True, False))
    assert replayed < plain / 2


def test_steps_are_usual_if_never_captured_or_once_they_are_replayed() -> None:
    cache = SlotCache()
    cache.make_room(128, 40, longest=40)
    model = tiny_model("llama")
    graphs = StepGraphs(model, cache, make_record=Recorder, device_type="cpu")
    graphs.begin()
    runner = ModelRunner(model, cache, num_slots=128, longest=40, graphs=graphs)
    with slot_attention(model):
        usual = []
        for num_rows, width in ((4, 2), (4, 2), (4, 2), (3, 2), (128, 5), (128, 5)):
            runner.forward([], [DecodeRow([5] * width, 7)] * num_rows)
            usual.append(runner.was_usual)
    assert usual == [False, False, True, True, True, True]


@pytest.mark.parametrize("settings", [{"cuda_graphs": False}, {"lockstep": lambda has_work: has_work}])
def test_nothing_is_captured_where_graphs_are_off_or_unsupported(recorder: Recorder, settings: dict[str, Any]) -> None:
    engine = GenerationEngine(tiny_model("llama"), **settings)
    drafting = GenerationEngine(
        tiny_model("llama"), speculation=Speculation(drafter="blocks", draft_blocks=1, num_draft_tokens=2), **settings
    )
    for _ in range(2):
        generate(engine, FEW_LIMITS)
        generate(drafting, FEW_LIMITS)
    with torch.autocast("cpu", torch.bfloat16):
        generate(GenerationEngine(tiny_model("llama")), FEW_LIMITS)
    assert not recorder.num_captured


@pytest.mark.gpu
@pytest.mark.parametrize("max_cache_bytes", [None, 200_000])
@pytest.mark.parametrize("drafter", [None, "ngram", "blocks"])
def test_cuda_graphs_draw_the_same_tokens_and_follow_the_weights(
    drafter: str | None, max_cache_bytes: int | None
) -> None:
    model = tiny_model("llama").to("cuda")
    own = {"draft_blocks": 1} if drafter == "blocks" else {}
    speculation = Speculation(drafter=drafter, num_draft_tokens=3, **own) if drafter else None  # type: ignore[arg-type]
    engine = GenerationEngine(model, max_slots=5, speculation=speculation, max_cache_bytes=max_cache_bytes)
    for change in (None, "in place", "elsewhere"):
        with torch.no_grad():
            for weight in model.parameters():
                if change == "in place":
                    weight.mul_(0.9)
                elif change == "elsewhere":
                    weight.data = weight.data.clone().mul_(1.2)
        uncaptured = generate(GenerationEngine(model, max_slots=5, cuda_graphs=False))
        for _ in range(2):
            assert tokens_of(generate(engine)) == tokens_of(uncaptured), change
    assert engine._graphs is not None
    assert engine._graphs._graphs


@pytest.mark.gpu
def test_a_model_that_looks_for_padding_is_captured(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model("gpt2").to("cuda")
    model.config.pad_token_id = 5
    engine = GenerationEngine(model)
    for _ in range(2):
        generate(engine)
    assert engine._graphs is not None
    assert engine._graphs._graphs
    assert not caplog.records
    assert model.config.pad_token_id == 5


@pytest.mark.gpu
def test_prompts_prefilled_together_in_bfloat16_equal_those_prefilled_singly(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_realloc.generation.forward import attention

    model = tiny_model("llama").to("cuda", torch.bfloat16)
    prompts, greedy = draw_prompts(9), SamplingParams(max_new_tokens=1, temperature=0)
    at_once = GenerationEngine(model).generate(prompts, greedy)
    monkeypatch.setattr(attention, "can_attend_varlen", lambda query, value: False)
    one_by_one = GenerationEngine(model).generate(prompts, greedy)
    for one, other in zip(at_once, one_by_one, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=0.05)
