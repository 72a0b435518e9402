"""Distributed execution: forward passes, parallel models, weight transfer, messages and measurement.

``parallel`` applies layouts to models and ``transfer`` executes reallocation plans.
"""
