"""The models and prices that a service would start with."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from api.doctor.findings import Finding, ok, warning, wrong
from api.server.workers.worker_programs import embedded_workers
from billing.prices import PriceError, load_prices
from store.settings import Settings, SettingsError
from workers.model.card import UnsupportedModel, read_card, weight_files
from workers.model.tiny import TINY_NAME, TINY_PATH


def models(settings: Settings) -> Iterator[Finding]:
    for name, path in (settings.models or {TINY_NAME: TINY_PATH}).items():
        try:
            card = read_card(name, path)
            files = weight_files(name, path)
        except (UnsupportedModel, OSError, ValueError) as error:
            yield wrong("model", str(error), f"weftd model check {path} (docs/models.md)")
            continue
        cut = [file.name for file in files if not _is_whole(file)]
        if cut:
            says = f"{name}: {', '.join(cut[:3])} in {path} is not a whole safetensors file"
            yield wrong("model", says, "download it again")
        else:
            size = sum(file.stat().st_size for file in files)
            yield ok("model", f"{name}: {card.architecture}, {size / 1e9:.1f} GB in {len(files)} files")


def engines(settings: Settings) -> Iterator[Finding]:
    """Check that the programs of the workers that the settings ask for are installed."""
    try:
        embedded_workers(settings, settings.models)
    except SettingsError as error:
        yield wrong("engines", str(error), "docs/vllm.md")
    else:
        yield ok("engines", f"a trainer, and generators of {', '.join(settings.generator.kinds)}")


def prices(settings: Settings) -> Iterator[Finding]:
    try:
        found = load_prices(settings.prices).unnamed(settings.models, datetime.now(UTC))
    except PriceError as error:
        yield wrong("prices", str(error), "mend the price list (docs/billing.md)")
    else:
        yield ok("prices", "the list is read")
        if found:
            yield warning("prices", found, "name it under prices.models in the file of --config (docs/billing.md)")


def _is_whole(file: Path) -> bool:
    """Whether a safetensors file is as long as its own header says. A shorter one is an interrupted download."""
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            header = json.loads(stream.read(length)) if length < file.stat().st_size else {}
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    except (OSError, ValueError, KeyError, struct.error):
        return False
    return bool(ends) and file.stat().st_size == 8 + length + max(ends)
