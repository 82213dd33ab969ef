"""Where a test's ranks meet: a store in the test's own process. A port that was chosen for one of them could be taken
by the time that it listens."""

from __future__ import annotations

from torch.distributed import TCPStore  # type: ignore[attr-defined]


def meeting() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def place(rank: int, ranks: int, port: int) -> dict[str, str]:
    """A rank's environment, as torchrun makes it. `port`: the meeting's."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
