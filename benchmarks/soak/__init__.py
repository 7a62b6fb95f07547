"""Serves a mixed load for minutes and follows memory and answers: ``python -m benchmarks.soak``."""
