"""Trial of bad input: thousands of generated mistakes in everything that a user writes, see ``__main__``."""
