"""The `weft` command: what a user of a server has, and what it cost."""

from weft.cli import exports, look, stored
from weft.cli.shell import main

__all__ = ["exports", "look", "main", "stored"]
