"""Answers requests of clients on other machines."""
