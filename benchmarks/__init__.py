"""Scripts that measure the figures in the documentation: ``python -m benchmarks.<name>``."""
