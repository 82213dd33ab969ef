"""Why a sign-in by the OpenID provider does not happen."""

from __future__ import annotations


class ProviderError(Exception):
    """The provider cannot be asked, or has answered what cannot be used. The message is for the operator's log."""


class NotProved(Exception):
    """It is not proved who somebody is. The message is for the operator's log, and repeats no part of a token."""


class Unwelcome(Exception):
    """The provider has proved who somebody is, and that is not enough. The message is for them."""
