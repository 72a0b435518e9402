"""Completions by vLLM, in a process of its own next to the rank, or by a running vLLM server.

`engine` begins here: it has the interface of `GenerationEngine`. `service` keeps vLLM running; `process` with `child`
and `server` are the two ways to reach it.
"""
