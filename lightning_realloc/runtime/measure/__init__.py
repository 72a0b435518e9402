"""Measure and keep host and device memory: peaks, offloading, garbage collection, seconds of a group.

Start with `memory_meter` and `Offload`.
"""
