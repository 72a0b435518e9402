"""Decide which samples run in which step. Pure: lengths and indices, no tensors.

Start with `Scheduler.next_step`.
"""
