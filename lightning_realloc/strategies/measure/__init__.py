"""Measure a running algorithm's passes, and estimate plans from them.

Start with `Profiler`.
"""
