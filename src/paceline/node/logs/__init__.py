"""The log files of ranks: read while they grow, and merged in the order of time."""
