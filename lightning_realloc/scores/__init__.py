"""Scores of held-out questions: per question, as means with intervals, and compared between runs. Pure."""

from __future__ import annotations
