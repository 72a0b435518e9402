"""Trial of the test suite: tests run on copies of the package with one seeded fault each, see ``__main__``."""
