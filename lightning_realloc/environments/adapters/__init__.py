"""Environments of other libraries as environments of messages, one module for each library.

Each module imports its library, so nothing in the package imports a module.
"""
