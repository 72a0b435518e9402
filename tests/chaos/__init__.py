"""Trial of faults: runs that are killed, stopped or signalled at chosen moments, see ``__main__``."""
