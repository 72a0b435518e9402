"""Runs to start from: ``python -m examples.demo``, and the same training in a few lines or in YAML."""
