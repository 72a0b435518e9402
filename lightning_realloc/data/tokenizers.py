"""Load the tokenizer of a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase, ProcessorMixin

from lightning_realloc.errors import ConfigError
from lightning_realloc.remote_path import expand_home, is_path, require_files

_PROBE = "a probe"
"""Text that no chat template writes."""
_templates_of_parts: dict[str, bool] = {}
"""Chat template -> whether it renders contents in parts alone."""


def load_tokenizer(source: str | Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a Hugging Face name or folder.

    Raises:
        ConfigError: if no tokenizer can be loaded from there, or it has only special tokens.
    """
    try:
        require_files(expand_home(source))
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(expand_home(source))
    except Exception as error:  # damaged files raise errors of any class
        raise ConfigError(
            f"no tokenizer could be loaded from {str(source)!r} ({describe_load_error(source, error)}); give "
            f"tokenizer= a Hugging Face name, or a folder with tokenizer.json"
        ) from error
    # From a folder without a tokenizer's files, transformers makes an empty one for some families.
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        raise ConfigError(
            f"{str(source)!r} has no files of a tokenizer: the {type(tokenizer).__name__} loaded from there knows "
            f"{len(tokenizer)} tokens, all of them special; give tokenizer= a Hugging Face name, or a folder with "
            f"tokenizer.json"
        )
    return tokenizer


def describe_load_error(source: str | Path, error: Exception) -> str:
    """Return the first line of an error of ``from_pretrained``; for a name on the hub, after what that needs."""
    reason = (str(error).splitlines() or [""])[0]
    if not isinstance(error, OSError | ValueError):
        reason = f"{type(error).__name__}: {reason}"
    if is_path(source) or type(error) is FileNotFoundError:  # of `require_files`, which names the place
        return reason
    hint = "a model of the hub needs a connection (HF_HUB_OFFLINE unset) or a download, and a gated one `hf auth login`"
    return f"there is no folder {str(source)!r} in {Path.cwd()}; {hint}; and: {reason}"


def tokenizer_in(processor: ProcessorMixin) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a processor, with its chat template."""
    tokenizer: PreTrainedTokenizerBase = processor.tokenizer
    if tokenizer.chat_template is None:
        tokenizer.chat_template = processor.chat_template
    return tokenizer


def needs_parts(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether a chat template renders contents in parts alone, as those of some vision-language models do."""
    template = tokenizer.chat_template
    if not isinstance(template, str) or "type" not in template:
        return False
    known = _templates_of_parts.get(template)
    if known is None:
        known = _templates_of_parts[template] = not _renders(tokenizer, _PROBE) and _renders(
            tokenizer, [{"type": "text", "text": _PROBE}]
        )
    return known


def _renders(tokenizer: PreTrainedTokenizerBase, content: Any) -> bool:
    try:
        return _PROBE in str(tokenizer.apply_chat_template([{"role": "user", "content": content}], tokenize=False))
    except Exception:  # templates may raise anything
        return False
