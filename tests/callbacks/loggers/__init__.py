"""Tables and pictures in loggers."""
