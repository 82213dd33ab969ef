"""Whom an address stands for, where something is counted by it."""

from __future__ import annotations

import ipaddress

#: What one customer of a provider has at least, to take addresses from as they like (RFC 6177).
_PREFIX_BITS = 64


def holder(address: str) -> str:
    """An IPv4 address itself, also as a listener for both gives it (::ffff:192.0.2.1); of IPv6 its network."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return address
    if isinstance(found, ipaddress.IPv4Address):
        return address
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    beyond = 128 - _PREFIX_BITS
    return f"{ipaddress.IPv6Address(int(found) >> beyond << beyond)}/{_PREFIX_BITS}"
