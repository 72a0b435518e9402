"""Processors of transformers' vision-language families for tests: a tokenizer of bytes, and small images."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from typing import Any
from unittest.mock import patch

from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast, ProcessorMixin
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3 import Gemma3Processor
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.idefics3 import Idefics3Processor
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.internvl import InternVLProcessor
from transformers.models.llava import LlavaProcessor
from transformers.models.llava_onevision import LlavaOnevisionProcessor
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil
from transformers.models.qwen2_5_vl import Qwen2_5_VLProcessor
from transformers.models.qwen2_vl import Qwen2VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl import Qwen3VLProcessor
from transformers.models.smolvlm import SmolVLMProcessor
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from tests.vision_models import BEGIN, END, IMAGE, SIDE, VIDEO

_TEMPLATE = (
    "{%- for message in messages %}<|{{ message.role }}|>{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}{% if part.type == 'image' %}PLACEHOLDER{% else %}{{ part.text }}"
    "{% endif %}{% endfor %}{% endif %}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_SQUARE: Mapping[str, Any] = {"size": {"height": SIDE, "width": SIDE}}
_PATCHES: Mapping[str, Any] = {
    "size": {"shortest_edge": SIDE * SIDE, "longest_edge": 4 * SIDE * SIDE}, "patch_size": 4, "merge_size": 2
}  # fmt: skip
_PARTS: Mapping[str, Any] = {
    "size": {"longest_edge": 2 * SIDE}, "max_image_size": {"longest_edge": SIDE}, "do_image_splitting": True
}  # fmt: skip
_Maker = Callable[[PreTrainedTokenizerFast, str], ProcessorMixin]


def _qwen(kind: Callable[..., ProcessorMixin]) -> _Maker:
    return lambda tokenizer, template: kind(Qwen2VLImageProcessorPil(**_PATCHES), tokenizer, None, template)


def _pixtral(tokenizer: PreTrainedTokenizerFast, template: str) -> ProcessorMixin:
    from transformers.models.pixtral import PixtralProcessor  # needs torchvision
    from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

    images = PixtralImageProcessorPil(size={"longest_edge": 2 * SIDE}, patch_size=4)
    made: ProcessorMixin = PixtralProcessor(images, tokenizer, 4, 2, template)
    return made


_PROCESSORS: Mapping[str, tuple[str, _Maker]] = {
    "qwen2_vl": ("<|vision_start|><|image_pad|><|vision_end|>", _qwen(Qwen2VLProcessor)),
    "qwen2_5_vl": ("<|vision_start|><|image_pad|><|vision_end|>", _qwen(Qwen2_5_VLProcessor)),
    "qwen3_vl": ("<|vision_start|><|image_pad|><|vision_end|>", _qwen(Qwen3VLProcessor)),
    "llava": ("<image>", lambda tokenizer, template: LlavaProcessor(
        CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size=_SQUARE["size"]), tokenizer, patch_size=8,
        vision_feature_select_strategy="default", num_additional_image_tokens=1, chat_template=template,
    )),
    "llava_onevision": ("<image>", lambda tokenizer, template: LlavaOnevisionProcessor(
        LlavaOnevisionImageProcessorPil(
            **_SQUARE, image_grid_pinpoints=[[SIDE, SIDE], [SIDE, 2 * SIDE], [2 * SIDE, SIDE]]
        ),
        tokenizer, None, num_image_tokens=4, vision_feature_select_strategy="full", chat_template=template,
    )),
    "internvl": ("<IMG_CONTEXT>", lambda tokenizer, template: InternVLProcessor(
        GotOcr2ImageProcessorPil(**_SQUARE, crop_to_patches=True, max_patches=2), tokenizer, None, 4, template
    )),
    "gemma3": ("<start_of_image>", lambda tokenizer, template: Gemma3Processor(
        Gemma3ImageProcessorPil(**_SQUARE), tokenizer, template, 4
    )),
    "mistral3": ("[IMG]", lambda tokenizer, template: _pixtral(tokenizer, template)),
    "smolvlm": ("<image>", lambda tokenizer, template: SmolVLMProcessor(
        SmolVLMImageProcessorPil(**_PARTS), tokenizer, None, 4, template
    )),
    "idefics3": ("<image>", lambda tokenizer, template: Idefics3Processor(
        Idefics3ImageProcessorPil(**_PARTS), tokenizer, 4, template
    )),
}  # fmt: skip
"""Family -> text that its template writes for an image, and its processor for a tokenizer and a template."""


_SPECIAL: Mapping[str, Mapping[int, str]] = {
    "qwen": {IMAGE: "<|image_pad|>", VIDEO: "<|video_pad|>", BEGIN: "<|vision_start|>", END: "<|vision_end|>"},
    "llava": {IMAGE: "<image>"},
    "llava_onevision": {IMAGE: "<image>", VIDEO: "<video>"},
    "internvl": {IMAGE: "<IMG_CONTEXT>", VIDEO: "<video>", BEGIN: "<img>", END: "</img>"},
    "gemma3": {IMAGE: "<image_soft_token>", BEGIN: "<start_of_image>", END: "<end_of_image>"},
    "mistral3": {IMAGE: "[IMG]", BEGIN: "[IMG_BREAK]", END: "[IMG_END]"},
    "smolvlm": {IMAGE: "<image>"},
    "idefics3": {IMAGE: "<image>"},
}
"""Family -> its special tokens about images, by their ids in the tiny models."""
_ATTRIBUTES: Mapping[str, Mapping[str, str]] = {
    "internvl": {
        "start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    },
    "gemma3": {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"},
}  # fmt: skip


PROCESSED_FAMILIES = tuple(
    family for family in _PROCESSORS if family != "mistral3" or importlib.util.find_spec("torchvision") is not None
)
"""Families whose processor works here; Mistral 3's needs torchvision."""


def tiny_processor(family: str) -> ProcessorMixin:
    """Return a family's processor with the chat template of these tests, for the models of `tests.vision_models`."""
    shown, make = _PROCESSORS[family]
    tokenizer = vision_tokenizer(family)
    checks = patch.object(ProcessorMixin, "check_argument_for_proper_class")  # that of videos needs torchvision
    words = patch("transformers.models.smolvlm.processing_smolvlm.num2words", str)  # a package for videos
    with checks, words:
        return make(tokenizer, _TEMPLATE.replace("PLACEHOLDER", shown))


def vision_tokenizer(family: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer with a token for each printable character, and the special tokens of a family."""
    names = _SPECIAL["qwen" if family.startswith("qwen") else family]
    splits = ["<fake_token_around_image>", "<global-img>", *(f"<row_{r}_col_{c}>" for r in (1, 2) for c in (1, 2))]
    ordinary = ["<pad>", "<bos>", "<eos>", "\n", *map(chr, range(32, 127)), *splits]
    vocabulary = {token: index for index, token in enumerate(ordinary)} | {name: at for at, name in names.items()}
    model = Tokenizer(WordLevel(vocabulary, unk_token="?"))
    model.pre_tokenizer = Split("", "isolated")
    model.decoder = Fuse()
    pad, bos, eos = ordinary[:3]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=model, pad_token=pad, bos_token=bos, eos_token=eos, padding_side="left",
        extra_special_tokens=_ATTRIBUTES.get(family, {}),
    )  # fmt: skip
    tokenizer.add_special_tokens({"additional_special_tokens": [*names.values(), *splits]})
    return tokenizer
