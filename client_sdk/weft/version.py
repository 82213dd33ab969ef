"""The version of the client, as its package says."""

from importlib.metadata import version

__version__ = version("weft")
