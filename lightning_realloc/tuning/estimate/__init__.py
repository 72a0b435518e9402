"""Estimate the seconds of a call, from shapes and data sheets or from measurements.

Start with `RooflineEstimator` and `MeasuredEstimator`; both implement `Estimator`.
"""
