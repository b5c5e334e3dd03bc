"""Environments of jobs: the packages that paceline installs on machines, see `source`."""
