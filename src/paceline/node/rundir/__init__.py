"""The run directory of a job and its lock."""
