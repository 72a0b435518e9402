"""Completions by vLLM, in a process of its own next to the rank, or by a running vLLM server.

Begin with `vllm_engine`, which has the interface of `GenerationEngine`. `service` keeps vLLM running; `process` with
`child`, and `vllm_server`, are the two ways to reach it.
"""
