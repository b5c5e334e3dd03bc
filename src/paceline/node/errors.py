"""Errors that a person can mend."""

from __future__ import annotations


class Refused(Exception):
    """This machine cannot do what was asked: says in one line what, where, and what to do."""
