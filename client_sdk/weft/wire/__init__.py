"""The one definition of what crosses the wire: JSON bodies (`weft.wire.types`) and binary ones (`weft.wire.binary`).

The server imports it from here; users see the types as `weft.types`. `binary/weft_wire_pb2.py` and its stub are
generated, in client_sdk/, by

    python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. weft/wire/binary/weft_wire.proto
    sed -i '1i # mypy: disable-error-code="type-arg"' weft/wire/binary/weft_wire_pb2.pyi
"""

from __future__ import annotations

from weft.wire.types import *  # noqa: F403
