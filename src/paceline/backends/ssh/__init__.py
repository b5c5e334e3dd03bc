"""Hosts that ssh reaches as a backend."""
