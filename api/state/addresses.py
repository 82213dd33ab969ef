"""Whom an IP address stands for, when something is counted by address."""

from __future__ import annotations

import ipaddress

#: The size of network that every customer of a provider has at least, and from which it can take addresses freely (RFC
#: 6177).
_PREFIX_BITS = 64
#: The longest address, with its zone, that the audit log holds.
_LONGEST = 64


def is_address(text: str) -> bool:
    try:
        return len(text) <= _LONGEST and bool(ipaddress.ip_address(text))
    except ValueError:
        return False


def holder(address: str) -> str:
    """Whom to count an address for: an IPv4 address itself, also in the form ::ffff:192.0.2.1; for IPv6 its network."""
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
