"""Importing this registers every job."""

from __future__ import annotations

import scheduler.jobs.housekeeping
import scheduler.jobs.money
import scheduler.jobs.payments  # noqa: F401
from scheduler.jobs.registry import JOBS as JOBS
