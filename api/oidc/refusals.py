"""Why a sign-in by the OpenID provider does not happen."""

from __future__ import annotations


class ProviderError(Exception):
    """The provider cannot be reached, or its answer cannot be used. The message is for the operator's log."""


class NotProved(Exception):
    """The person's identity is not proved. The message is for the operator's log, and contains no part of a token."""


class Unwelcome(Exception):
    """The person's identity is proved, but they may not sign in. The message is for them."""
