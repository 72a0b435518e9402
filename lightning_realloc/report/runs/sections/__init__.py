"""Sections of a run's report: each module has functions from a `RunFolder` to plain values of JSON. Pure.

Start with `learning`; `report.runs.charts` has the values that all sections consist of.
"""
