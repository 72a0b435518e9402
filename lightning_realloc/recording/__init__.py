"""What each rank did in a run, when and with how much memory: written while it trains, read by reports.

Start with `IterationRecord`; `RankRecorder` writes records, and `read_run` reads those of all ranks.
"""
