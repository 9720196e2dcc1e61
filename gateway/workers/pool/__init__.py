"""The pool: all models of the configuration with their workers."""
