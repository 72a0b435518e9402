"""Trial of resuming: every algorithm and layout from every moment of a run, see ``__main__``."""
