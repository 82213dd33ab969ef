"""Exports of a run's adapter for other tools: `save_weights_external`."""

from __future__ import annotations

from weft.wire import SaveWeightsExternalRequest

from store.blobs import Blobs
from workers.model.encryption import encrypt_folder, parse_recipients
from workers.model.peft_format import write_export
from workers.trainer.state import RunState


def save_external(run: RunState, blobs: Blobs, ref: str, body: bytes) -> int:
    """Write the adapter as an export (`peft_format`) at `ref`, encrypted where `body` names recipients. Returns its
    size in bytes."""
    request = SaveWeightsExternalRequest.model_validate_json(body)
    recipients = parse_recipients(request.age_encryption_recipients or [])
    adapter, spec = run.adapter, run.spec
    arrays = {name: view.cpu().numpy() for name, view in adapter.views.items()}
    with blobs.new_folder(ref) as folder:
        write_export(folder, arrays, base_model=spec.base_model, rank=spec.rank, alpha=adapter.scale * adapter.rank)
        if recipients:
            encrypt_folder(folder, recipients)
    return blobs.size_bytes(ref)
