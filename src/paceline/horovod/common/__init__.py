"""What the APIs of all frameworks have in common: starting and queries, errors, process sets, elastic states."""
