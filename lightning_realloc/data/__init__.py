"""Data modules and loaders: prompts, demonstrations, preferences and feedback as identical samples on every rank.

Start with `RowDataModule`, the base of all data modules, and `BatchLoader`.
"""
