"""This machine as a backend."""
