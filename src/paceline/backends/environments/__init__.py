"""Environments: the packages of a job, which paceline installs on its machines; see `machines`."""
