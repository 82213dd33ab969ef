"""Kills, full disks and damaged files: a real service is harmed from outside, and clients of the official SDK note what
they see."""
