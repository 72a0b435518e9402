"""Declare an algorithm: roles, model function calls, optimizers, adapters, evaluation.

Start with `MultiModelModule`, the LightningModule that every algorithm extends.
"""
