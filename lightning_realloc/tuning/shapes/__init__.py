"""Count the elements of a model on each rank, its experts and the lengths of its sequences. Pure arithmetic.

Start with `ModelShape` and `RoleElements`.
"""
