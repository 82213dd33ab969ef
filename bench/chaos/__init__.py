"""Kills, full disks and damaged files, from outside: a real service, clients of the official SDK, and what they see."""
