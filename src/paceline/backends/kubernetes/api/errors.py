"""Why a request to an API server has failed."""

from __future__ import annotations

from paceline.job.errors import UserError


class ApiError(UserError):
    """The API server refuses a request.

    Attributes:
        code: the HTTP status.
        reason: such as AlreadyExists.
    """

    def __init__(self, text: str, code: int, reason: str) -> None:
        super().__init__(text)
        self.code, self.reason = code, reason


class Unreachable(UserError):
    """The API server does not answer."""


class Expired(Exception):
    """The version that a watch begins at is gone: list again."""
