"""Reports of plans: the ``plan`` command, its tables, and the models that it reads.

Start with `run_plan`.
"""
