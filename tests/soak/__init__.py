"""Trial of long runs: memory, descriptors, threads and maps over thousands of iterations, see ``__main__``."""
