"""Attention over packed rows, of one rank and of ranks that divide the tokens of each row.

Start with `packed_attention`, which calls a model on a pack; `segment_scores` computes.
"""
