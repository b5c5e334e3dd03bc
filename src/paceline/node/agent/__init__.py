"""The agent: one process per node that starts the ranks, watches them, and reports how they ended."""
