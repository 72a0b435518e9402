"""Trial of runs over several hosts, which are network namespaces: ``python -m tests.multinode``."""
