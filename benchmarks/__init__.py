"""Every number that the documents claim comes from one of these scripts: ``python -m benchmarks.<name>``."""
