"""Functions that torch renamed, under one name. docs/compatibility.md lists the tested versions."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""Gathers tensors of equal size into one tensor; torch 2.13 deprecates its old name, ``all_gather_into_tensor``."""
