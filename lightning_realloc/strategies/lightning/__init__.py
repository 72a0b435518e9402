"""Implement Lightning's Strategy: processes, launchers, signals, optimizer and checkpoint hooks.

Start with `DataParallelStrategy`.
"""
