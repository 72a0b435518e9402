"""Estimate the seconds of a call under a plan, from rooflines or from measurements.

Start with `Estimator`, then `RooflineEstimator` and `MeasuredEstimator`.
"""
