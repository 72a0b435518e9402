"""Inspect and change a Hugging Face model on one process: blocks, tied weights, adapters, missing weights.

Nothing here knows about ranks. Start with `find_blocks`.
"""
