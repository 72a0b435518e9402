"""Simulate when every call of a plan runs, and how long ranks wait.

Start with `simulate`.
"""
