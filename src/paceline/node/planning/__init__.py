"""Fits a job to a machine before anything of it starts."""
