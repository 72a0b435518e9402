"""Build and keep the replicas of every role on this rank, and apply another plan to them.

Start with `ModelPool`.
"""
