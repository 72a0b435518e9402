"""Environments, tools and partners that a policy talks to in its rollouts, as its settings name them."""

from __future__ import annotations
