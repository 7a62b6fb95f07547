"""Measures a complete compression job, phase by phase, on random weights of published models' shapes."""
