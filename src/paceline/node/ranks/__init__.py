"""Starts ranks through the fork server, and stops them."""
