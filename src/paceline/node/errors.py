"""Errors that the user can correct."""

from __future__ import annotations


class Refused(Exception):
    """This machine cannot do what was asked; the message is one line: what, where, and what to do."""
