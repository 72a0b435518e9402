"""Run the model function calls of an iteration on this rank.

Start with `CallRunner`.
"""
