"""Doing it: models laid out over ranks, weights and samples moved between them."""
