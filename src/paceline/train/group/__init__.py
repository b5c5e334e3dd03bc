"""Joining the other ranks, and what ranks do together."""
