"""The `weft` command: what a user of a server has, and what it cost."""

from weft.cli.main import main as main
