"""paceline beside the others: `python -m benchmarks` measures both sides in one run and prints their ratios."""
