"""The report of running runs in a browser, on this machine, and their figures for Prometheus.

Start with `DashboardServer`.
"""
