"""Batches that are drawn: by measured difficulty, and from several data sets in exact proportions."""
