"""Whether sandboxes can be made on this machine, found out without their own code: tools, and user namespaces."""

from __future__ import annotations

import os
import shutil
import subprocess
from functools import cache
from typing import Any

import pytest


@cache
def possible() -> bool:
    if shutil.which("bwrap") is None or shutil.which("unshare") is None:
        return False
    user: dict[str, Any] = {"user": 65534, "group": 65534, "extra_groups": []} if os.geteuid() == 0 else {}
    command = ["unshare", "--user", "--map-root-user", "--mount", "true"]
    return subprocess.run(command, check=False, capture_output=True, cwd="/", **user).returncode == 0


isolated = pytest.mark.skipif(not possible(), reason="apt-get install bubblewrap, where namespaces are allowed")
