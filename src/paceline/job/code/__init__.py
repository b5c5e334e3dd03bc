"""Brings a job's code to its place."""
