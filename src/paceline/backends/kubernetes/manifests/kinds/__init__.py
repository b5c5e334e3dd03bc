"""The kinds of objects that a job can be."""
