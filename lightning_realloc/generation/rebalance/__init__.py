"""Move samples between data-parallel ranks while they generate, so that all finish together.

Start with `Migration`; `balance` plans the moves and is pure.
"""
