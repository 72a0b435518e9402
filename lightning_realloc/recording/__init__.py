"""Records of runs: calls, moves, waits and memory of every rank over time; written in training, read by reports.

Start with `IterationRecord`; `RankRecorder` writes records, and `read_run` reads those of all ranks.
"""
