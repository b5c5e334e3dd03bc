"""Compares paceline with other tools: `python -m benchmarks` measures both in one run and prints their ratios."""
