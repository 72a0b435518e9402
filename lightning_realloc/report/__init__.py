"""What is said about plans, before and after a run: texts for people, made from values of ``tuning``."""
