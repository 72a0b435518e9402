"""Compute losses, advantages and their metrics from packed tensors. No models, no ranks.

Start with `functional`; `PolicyLoss` and `pair_loss` choose one by name.
"""
