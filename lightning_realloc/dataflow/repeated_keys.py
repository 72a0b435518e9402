"""Refuse YAML whose mappings have a key more than once."""

from __future__ import annotations

import yaml


def refuse_repeated_keys(text: str) -> None:
    """Raise yaml.YAMLError for a mapping that has a key more than once, of which PyYAML keeps the last one silently.

    Merge keys (``<<``) may give keys that the mapping has itself: those of the mapping count.
    """
    pending, seen = [yaml.compose(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))], set()
    while pending:
        node = pending.pop()
        if id(node) in seen or not isinstance(node, yaml.CollectionNode):  # an alias is the node of its anchor
            continue
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            pending += node.value
            continue
        lines: dict[tuple[str, str], int] = {}
        for key, value in node.value:
            pending.append(value)
            if not isinstance(key, yaml.ScalarNode):
                continue
            name, line = (key.tag, key.value), key.start_mark.line + 1
            if name in lines:
                raise yaml.YAMLError(f"the key {key.value} is given in line {lines[name]} and in line {line}; keep one")
            lines[name] = line
