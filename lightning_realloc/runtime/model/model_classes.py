"""Find the transformers class of a model by its task: language models, with a tower if they read images, classifiers.

Transformers has classifiers of few families that read images. The others are made here, of its backbone and its
generic heads. Such a class has a name in this module, by which pickle and exports of checkpoints find it again.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any, Literal

import transformers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.modeling_layers import GenericForSequenceClassification, GenericForTokenClassification
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
)

from lightning_realloc.runtime.model.image_inputs import IMAGE_FAMILIES

Task = Literal["causal_lm", "sequence_classification", "token_classification"]

AUTO_CLASSES: dict[Task, Any] = {
    "causal_lm": AutoModelForCausalLM,
    "sequence_classification": AutoModelForSequenceClassification,
    "token_classification": AutoModelForTokenClassification,
}
_CLASSES: dict[Task, Any] = {
    "causal_lm": MODEL_FOR_CAUSAL_LM_MAPPING,
    "sequence_classification": MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    "token_classification": MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
}
_HEADS: dict[Task, tuple[str, type]] = {
    "sequence_classification": ("ForSequenceClassification", GenericForSequenceClassification),
    "token_classification": ("ForTokenClassification", GenericForTokenClassification),
}
"""Ending of a classifier's name, and the generic class of its head."""
_HEAD_OF_NAME = re.compile(r"For[A-Z]\w*$")


def model_class(task: Task, config: PreTrainedConfig) -> Any | None:
    """Return the class whose ``from_config`` and ``from_pretrained`` make a model for a task; None if there is none.

    A family that reads images has its tower, also where transformers' class of language models would leave it out. A
    family of which transformers has no model with a tower keeps its class of language models.
    """
    kind = type(config)
    is_language_model = task == "causal_lm" and (config.model_type in IMAGE_FAMILIES or kind not in _CLASSES[task])
    if is_language_model and kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return AutoModelForImageTextToText
    if kind in _CLASSES[task]:
        return AUTO_CLASSES[task]
    if task in _HEADS and kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return _image_classifier(task, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[kind])
    return None


def is_of_another_task(model: PreTrainedModel, task: Task) -> bool:
    """Return whether a model's class has the head of another task."""
    return any(type(model) in _classes(other, model.config) for other in _CLASSES if other != task)


def _classes(task: Task, config: PreTrainedConfig) -> tuple[type[PreTrainedModel], ...]:
    """Return the classes of transformers, or the one made here, of a family for a task."""
    found = model_class(task, config)
    if found is None or issubclass(found, PreTrainedModel):
        return () if found is None else (found,)
    known = found._model_mapping[type(config)]
    return known if isinstance(known, tuple) else (known,)


class _ImageClassifier:
    """Makes a class of transformers' parts load and save its weights under the names that those parts have in files."""

    @classmethod
    def from_config(cls: Any, config: PreTrainedConfig, **options: Any) -> Any:
        """Return a model with random weights, as the auto classes do."""
        return cls._from_config(config, **options)

    @classmethod
    def is_custom_code(cls) -> bool:
        return False


@cache
def _image_classifier(task: Task, language_model: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """Return a class of the backbone of a model of images and text with a head of scores."""
    ending, head = _HEADS[task]
    name = _HEAD_OF_NAME.sub("", language_model.__name__) + ending
    family = next(base for base in language_model.__mro__[1:] if issubclass(base, PreTrainedModel))
    renamed = get_checkpoint_conversion_mapping(language_model.__name__)
    if renamed is not None:
        register_checkpoint_conversion_mapping(name, renamed, overwrite=True)
    return type(name, (_ImageClassifier, head, family), {"__module__": __name__})


def __getattr__(name: str) -> type[PreTrainedModel]:
    """Return a classifier of images and text by its name."""
    for task, (ending, _) in _HEADS.items():
        for known in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values() if name.endswith(ending) else ():
            if _HEAD_OF_NAME.sub("", known) == name.removesuffix(ending):
                return _image_classifier(task, getattr(transformers, known))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
