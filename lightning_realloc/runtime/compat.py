"""Names that torch has changed, in one place. What was tried: docs/compatibility.md."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""Gathers equal tensors end to end; torch 2.13 deprecates its older name, ``all_gather_into_tensor``."""
