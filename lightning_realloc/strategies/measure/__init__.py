"""Profile a running algorithm's models, and evaluate plans by the profile.

Start with `profiling.profile_models`; `subjects` chooses the models and `profiler` measures their passes.
"""
