"""Generation from a model in pipeline stages: the last one runs the loop and draws, the others follow its commands.

Begin with `StagedEngine` in `staged_engine`.
"""
