"""Count what a model is made of: elements per rank, experts, sequence lengths. Pure numbers.

Start with `ModelShape` and `RoleElements`.
"""
