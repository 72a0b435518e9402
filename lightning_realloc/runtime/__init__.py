"""Distributed execution: forward passes, parallel models, weight transfer, messages and measurement.

Start with `parallel`, which applies layouts to models, and `transfer`, which executes reallocation plans.
"""
