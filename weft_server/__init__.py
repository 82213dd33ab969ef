"""`weftd`, from wherever its rooms are: the top of a checkout, or this package of an installation.

The rooms (api, billing, migrations, scheduler, store, workers) stand at the top of a checkout, where people look for
them. An installation takes one name, `weft_server`, and holds them in it: `api` and `store` are everybody's names. They
import each other as in the checkout, because `main` puts their folder on the path of its own process, and the
supervisor on that of its workers; no other program of that environment sees them.
"""

from __future__ import annotations

import sys
from pathlib import Path

__version__ = "0.1.0"


def rooms() -> Path:
    """The folder that the rooms are in."""
    here = Path(__file__).resolve().parent
    return here if (here / "api").is_dir() else here.parent


def client_problem() -> str | None:
    """Why the client that is installed here is not this server's own, or None."""
    try:
        import weft
    except ImportError as error:
        return str(error)
    found = getattr(weft, "__version__", None) or "another package of the import name weft"
    if found == __version__:
        return None
    return (
        f"weft-tuning-server {__version__} needs weft-tuning {__version__}; here `import weft` gives {found}. "
        f"pip uninstall weft; pip install --force-reinstall --no-deps weft-tuning=={__version__}"
    )


def main() -> None:
    """The entry point."""
    problem = client_problem()
    if problem is not None:
        print(f"weftd: {problem}", file=sys.stderr)
        sys.exit(2)
    sys.path.insert(0, str(rooms()))
    from api.cli import main as weftd

    weftd()
