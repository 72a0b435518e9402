"""Start vLLM's process: the interpreter (`interpreter`), and the log with the cause of a failure (`process_log`)."""
