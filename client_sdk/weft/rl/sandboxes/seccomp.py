"""A filter of system calls for sandboxes, as bubblewrap takes it: a classic BPF program (seccomp(2)).

Refused are calls that reserve memory which no limit of a process counts (shared memory without a file, too: it is no
process's own once it is unmapped), parts of the kernel that untrusted code has no need of, and all sockets but those
that namespaces hold. So are calls into another process: process 1 is bubblewrap's, and ends what runs when its time
has come. Namespaces, mounts and modules need no filter: they take privileges that a sandbox has not.
"""

from __future__ import annotations

import errno
import platform
import struct

#: By machine: the kernel's name for its system calls (AUDIT_ARCH), and the numbers of the refused ones.
MACHINES = {
    "x86_64": (
        0xC000003E,
        {
            **{"memfd_create": 319, "memfd_secret": 447, "shmget": 29, "msgget": 68, "userfaultfd": 323, "bpf": 321},
            **{"perf_event_open": 298, "io_uring_setup": 425, "add_key": 248, "request_key": 249, "keyctl": 250},
            **{"ptrace": 101, "process_vm_writev": 311},
        },
    ),
    "aarch64": (
        0xC00000B7,
        {
            **{"memfd_create": 279, "memfd_secret": 447, "shmget": 194, "msgget": 186, "userfaultfd": 282, "bpf": 280},
            **{"perf_event_open": 241, "io_uring_setup": 425, "add_key": 217, "request_key": 218, "keyctl": 219},
            **{"ptrace": 117, "process_vm_writev": 271},
        },
    ),
}
#: By machine: the numbers of the calls whose arguments decide: mmap, socket, socketpair.
_BY_ARGUMENT = {"x86_64": (9, 41, 53), "aarch64": (222, 198, 199)}
#: The allowed families of sockets: unix, IPv4, IPv6, netlink. Others reach the hypervisor (vsock) or the kernel.
_FAMILIES = (1, 2, 10, 16)
_SHARED_ANONYMOUS = 0x01 | 0x20
_LOAD, _AND, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x06
#: The offsets in struct seccomp_data of the call's number, its machine, and the lower halves of its first and fourth
#: argument.
_NUMBER, _ARCH, _FIRST, _FOURTH = 0, 4, 16, 40
_ALLOW, _KILL, _REFUSE = 0x7FFF0000, 0x80000000, 0x00050000 | errno.EPERM
#: Numbers from here on are calls of another convention (x32), which would get around the filter.
_FOREIGN = 0x40000000
#: Jumps to one of the last two steps.
_TO_REFUSE, _TO_ALLOW = -2, -1


def program(machine: str | None = None) -> bytes:
    """The filter for `machine`, by default this one. Raises KeyError for a machine whose calls are not known here."""
    machine = machine or platform.machine()
    arch, refused = MACHINES[machine]
    mmap, socket, socketpair = _BY_ARGUMENT[machine]
    steps = [
        *((_LOAD, 0, 0, _ARCH), (_EQUAL, 1, 0, arch), (_RETURN, 0, 0, _KILL)),
        *((_LOAD, 0, 0, _NUMBER), (_AT_LEAST, _TO_REFUSE, 0, _FOREIGN)),
        *((_EQUAL, _TO_REFUSE, 0, number) for number in sorted(refused.values())),
        *((_EQUAL, 0, 3, mmap), (_LOAD, 0, 0, _FOURTH), (_AND, 0, 0, _SHARED_ANONYMOUS)),
        (_EQUAL, _TO_REFUSE, _TO_ALLOW, _SHARED_ANONYMOUS),
        *((_EQUAL, 1, 0, socket), (_EQUAL, 0, _TO_ALLOW, socketpair), (_LOAD, 0, 0, _FIRST)),
        *((_EQUAL, _TO_ALLOW, 0, family) for family in _FAMILIES),
        *((_RETURN, 0, 0, _REFUSE), (_RETURN, 0, 0, _ALLOW)),
    ]

    def over(place: int, jump: int) -> int:
        """How many steps a jump skips; a negative jump names a step counted from the end."""
        return jump if jump >= 0 else len(steps) + jump - place - 1

    return b"".join(
        struct.pack("=HBBI", code, over(place, yes), over(place, no), value)
        for place, (code, yes, no, value) in enumerate(steps)
    )
