"""Rows that are read as they are needed: places in a stream, blocks of samples, and their loader."""
