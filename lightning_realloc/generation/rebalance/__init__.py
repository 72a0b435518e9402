"""Moves of samples between data-parallel ranks while they generate, so that all ranks finish together.

`Rebalancer` in `protocol` is the entry point. `balance_policy` plans the moves and is pure.
"""
