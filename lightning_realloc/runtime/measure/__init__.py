"""Measure memory and time, and manage memory: peaks, offloading, garbage collection, seconds of a group of ranks.

Start with `memory_meter` and `Offload`.
"""
