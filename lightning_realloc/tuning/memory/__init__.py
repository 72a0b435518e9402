"""Forecast the bytes that every rank needs in each call of a plan.

Start with `forecast_memory`.
"""
