"""Inspects a machine or several hosts, and finds what would go wrong with a job there."""
