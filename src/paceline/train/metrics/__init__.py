"""Metrics that a script logs, and the times of its steps."""
