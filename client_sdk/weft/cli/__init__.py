"""The `weft` command: what a user of a server has, and what it cost."""

from weft.cli import look, stored
from weft.cli.shell import main

__all__ = ["look", "main", "stored"]
