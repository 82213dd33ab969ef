"""Weft's client: `from weft import ServiceClient, types`.

A training loop written for Tinker runs after changing its import: clients, methods and types have the same names.
"""

from __future__ import annotations

from weft import types
from weft.errors import (
    APIConnectionError,
    APIError,
    APIResponseValidationError,
    APIStatusError,
    APITimeoutError,
    AuthenticationError,
    BadRequestError,
    BillingError,
    ConflictError,
    GoneError,
    InternalServerError,
    LaneBrokenError,
    NotFoundError,
    PermissionDeniedError,
    RateLimitError,
    RequestFailedError,
    UnprocessableEntityError,
    WeftError,
)
from weft.future import APIFuture
from weft.rest_client import RestClient
from weft.retry import RetryPolicy
from weft.sampling_client import SamplingClient
from weft.service_client import ServiceClient
from weft.training_client import TrainingClient
from weft.types import *  # noqa: F403
from weft.types import __all__ as _type_names
from weft.version import __version__

__all__ = [
    "APIConnectionError",
    "APIError",
    "APIFuture",
    "APIResponseValidationError",
    "APIStatusError",
    "APITimeoutError",
    "AuthenticationError",
    "BadRequestError",
    "BillingError",
    "ConflictError",
    "GoneError",
    "InternalServerError",
    "LaneBrokenError",
    "NotFoundError",
    "PermissionDeniedError",
    "RateLimitError",
    "RequestFailedError",
    "RestClient",
    "RetryPolicy",
    "SamplingClient",
    "ServiceClient",
    "TrainingClient",
    "UnprocessableEntityError",
    "WeftError",
    "__version__",
    "types",
]
__all__ += _type_names
