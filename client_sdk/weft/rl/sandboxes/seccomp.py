"""A filter of system calls for sandboxes, as bubblewrap takes it: a classic BPF program (seccomp(2)).

Refused are calls that reserve memory which no limit of a process counts, and parts of the kernel that untrusted code
has no need of. Namespaces, mounts and modules need no filter: they take privileges that a sandbox has not.
"""

from __future__ import annotations

import errno
import platform
import struct

#: By machine: the kernel's name for its calls (AUDIT_ARCH), and the numbers of what is refused.
MACHINES = {
    "x86_64": (
        0xC000003E,
        {
            **{"memfd_create": 319, "memfd_secret": 447, "shmget": 29, "msgget": 68, "userfaultfd": 323, "bpf": 321},
            **{"perf_event_open": 298, "io_uring_setup": 425, "add_key": 248, "request_key": 249, "keyctl": 250},
        },
    ),
    "aarch64": (
        0xC00000B7,
        {
            **{"memfd_create": 279, "memfd_secret": 447, "shmget": 194, "msgget": 186, "userfaultfd": 282, "bpf": 280},
            **{"perf_event_open": 241, "io_uring_setup": 425, "add_key": 217, "request_key": 218, "keyctl": 219},
        },
    ),
}
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW, _KILL, _REFUSE = 0x7FFF0000, 0x80000000, 0x00050000 | errno.EPERM
#: Numbers from here on are calls of another convention (x32), by which a filter could be passed.
_FOREIGN = 0x40000000


def program(machine: str | None = None) -> bytes:
    """The filter for a machine, or this one. Raises KeyError for one whose calls are not known here."""
    arch, refused = MACHINES[machine or platform.machine()]
    numbers = sorted(refused.values())
    steps = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, arch), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, 0)]
    steps.append((_AT_LEAST, len(numbers) + 1, 0, _FOREIGN))
    steps += [(_EQUAL, len(numbers) - place, 0, number) for place, number in enumerate(numbers)]
    steps += [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _REFUSE)]
    return b"".join(struct.pack("=HBBI", *step) for step in steps)
