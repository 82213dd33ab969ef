"""Where the rooms go in an installation: inside `weft_server`, which says why. All else is in pyproject.toml."""

from setuptools import find_namespace_packages, setup

ROOMS = ("api", "billing", "migrations", "scheduler", "store", "workers")
found = find_namespace_packages(include=[name for room in ROOMS for name in (room, f"{room}.*")])

setup(
    packages=["weft_server", *(f"weft_server.{name}" for name in found if "__pycache__" not in name)],
    package_dir={f"weft_server.{room}": room for room in ROOMS},
)
