"""The version of the client, which is that of the servers that it belongs to."""

__version__ = "0.1.0"
