"""Packing compared with plain Python lists: the order of tokens, masks and columns."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_realloc.batch.packing import pack
from lightning_realloc.batch.ragged import Ragged
from lightning_realloc.batch.samples import Samples
from lightning_realloc.errors import DataError

TOKENS = st.lists(st.integers(0, 99), min_size=0, max_size=5)


def _samples(prompts: list[list[int]], responses: list[list[int]]) -> Samples:
    return Samples(
        torch.arange(len(prompts)) * 10,
        {
            "prompt_ids": Ragged.from_list(prompts),
            "response_ids": Ragged.from_list(responses),
            "advantages": torch.arange(len(prompts)).float(),
            "behaviour_logprobs": Ragged.from_list(
                [[-float(token) for token in row] for row in responses], dtype=torch.float32
            ),
        },
    )


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(TOKENS, TOKENS).filter(lambda pair: any(pair)), min_size=1, max_size=6))
def test_a_pack_lays_prompts_and_responses_end_to_end(pairs: list[tuple[list[int], list[int]]]) -> None:
    prompts, responses = [p for p, _ in pairs], [r for _, r in pairs]
    packed = pack(_samples(prompts, responses), columns=("advantages", "behaviour_logprobs"))
    row, positions, mask, owner, logprobs, bounds = [], [], [], [], [], [0]
    for index, (prompt, response) in enumerate(pairs):
        row += prompt + response
        positions += range(len(prompt + response))
        mask += [t >= max(len(prompt), 1) for t in range(len(prompt + response))]
        owner += [index] * len(prompt + response)
        logprobs += [0.0] * len(prompt) + [-float(token) for token in response]
        bounds.append(len(row))
    assert packed.input_ids.tolist() == [row]
    assert packed.position_ids.tolist() == [positions]
    assert packed.response_mask.tolist() == mask
    assert packed.sample_index.tolist() == owner
    assert packed.cu_seqlens.tolist() == bounds
    assert packed.cu_seqlens.dtype == torch.int32
    assert packed["behaviour_logprobs"].tolist() == logprobs
    assert packed.per_token(packed["advantages"]).tolist() == [float(index) for index in owner]
    assert packed.responses(packed.input_ids[0]).to_lists() == responses
    assert packed.max_length == max(len(p + r) for p, r in pairs)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.tuples(TOKENS, st.lists(TOKENS, min_size=1, max_size=4)).filter(lambda group: group[0] or all(group[1])),
        min_size=1,
        max_size=4,
    )
)
def test_sharing_prompts_loses_no_token_and_holds_every_shared_prompt_once(
    groups: list[tuple[list[int], list[list[int]]]],
) -> None:
    prompts = [prompt for prompt, answers in groups for _ in answers]
    responses = [answer for _, answers in groups for answer in answers]
    packed = pack(_samples(prompts, responses), columns=("behaviour_logprobs",), share_prompts=True)
    apart = pack(_samples(prompts, responses), columns=("behaviour_logprobs",))
    ends, held = torch.tensor(packed.lengths).cumsum(0) - 1, [0] * packed.num_tokens
    for index, end in enumerate(ends.tolist()):
        walked, at = [], end  # back from a sequence's last token, from predecessor to predecessor
        while True:
            held[at] += 1
            walked.append((int(packed.input_ids[0, at]), int(packed.position_ids[0, at])))
            if int(packed.position_ids[0, at]) == 0:
                break
            at = int(packed.predecessors[at])
        whole = prompts[index] + responses[index]
        assert walked[::-1] == [(token, position) for position, token in enumerate(whole)]
    assert packed.multiplicity.tolist() == held
    spared = sum(
        len(prompt) for before, prompt, answer in zip(prompts[:-1], prompts[1:], responses[1:], strict=True)
        if before == prompt and answer
    )  # fmt: skip
    assert packed.num_tokens == apart.num_tokens - spared
    assert packed.max_length == apart.max_length
    for name in ("input_ids", "response_mask", "behaviour_logprobs"):
        ours, theirs = (
            pack_.responses(getattr(pack_, name, pack_.columns.get(name)).flatten()) for pack_ in (packed, apart)
        )
        assert ours.to_lists() == theirs.to_lists()
    assert apart.predecessors.tolist() == [
        index - (position > 0) for index, position in enumerate(apart.position_ids[0].tolist())
    ]


def test_packing_names_the_sample_that_does_not_fit() -> None:
    samples = _samples([[1], [2]], [[3], [4, 5]])
    with pytest.raises(DataError, match="sample 10 has 1 values for 2 tokens"):
        pack(samples.with_columns(old=Ragged.from_list([[1.0], [2.0]])), columns=("old",))
    with pytest.raises(DataError, match="'prompt' holds python objects"):
        pack(samples.with_columns(prompt=("a", "b")), columns=("prompt",))
    with pytest.raises(DataError, match="prompt and response of sample 0 are empty"):
        pack(_samples([[]], [[]]))
    with pytest.raises(DataError, match="at least one sequence"):
        pack(samples.select([]))
    with pytest.raises(DataError, match="no column 'rewards' was packed"):
        pack(samples)["rewards"]


def test_experts_follow_their_tokens_and_prompts_with_other_experts_are_not_shared() -> None:
    prompt, responses = [5, 6], [[7], [8, 9], [1], [2]]
    first, other = [[0, 1], [2, 3]], [[0, 1], [3, 2]]  # of the prompt's tokens
    own = [[[place, place] for _ in response] for place, response in enumerate(responses)]
    rows = [first + own[0], first + own[1], other + own[2], other + own[3]]
    experts = Ragged.from_list([torch.tensor(row, dtype=torch.uint8) for row in rows])
    packed = pack(_samples([prompt] * 4, responses).with_columns(experts=experts), share_prompts=True)
    assert packed.shared == (0, 2, 0, 2)
    assert packed.experts is not None and packed.experts.dtype == torch.uint8
    assert packed.experts.tolist() == first + own[0] + own[1] + other + own[2] + own[3]
