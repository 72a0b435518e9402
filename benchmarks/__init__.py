"""Every number that a document of this project claims comes from one of these scripts: ``python -m benchmarks.<name>``."""
