"""Copies a job's code: by git, by rsync, or as a snapshot."""
