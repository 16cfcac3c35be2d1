"""The system calls that code in the bubblewrap sandbox may not make, as a seccomp filter.

Namespaces hide everything already; the filter keeps the code to one process, away from sockets that
namespaces do not cover (AF_VSOCK), from memory that no limit counts (memfd, System V segments), and
from parts of the kernel that computing does not need.
"""

from __future__ import annotations

import ctypes
import platform
import struct
from collections.abc import Mapping

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCH, _FIRST_ARGUMENT = 0, 4, 16
_ALLOW, _ERROR, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_EPERM, _ENOSYS = 1, 38
_CLONE_THREAD, _AF_UNIX = 0x10000, 1
_X32 = 0x40000000
"""First number of a second table of calls on x86-64, which no program needs."""

_ARCHES: Mapping[str, int] = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_DENIED = """
fork 57 -                     vfork 58 -                    execve 59 221
execveat 322 281              unshare 272 97                setns 308 268
mount 165 40                  umount2 166 39                pivot_root 155 41
chroot 161 51                 open_tree 428 428             move_mount 429 429
fsopen 430 430                fsconfig 431 431              fsmount 432 432
fspick 433 433                mount_setattr 442 442         name_to_handle_at 303 264
open_by_handle_at 304 265     ptrace 101 117                process_vm_readv 310 270
process_vm_writev 311 271     process_madvise 440 440       kcmp 312 272
pidfd_open 434 434            pidfd_getfd 438 438           memfd_create 319 279
memfd_secret 447 447          shmget 29 194                 semget 64 190
msgget 68 186                 mq_open 240 180               add_key 248 217
request_key 249 218           keyctl 250 219                bpf 321 280
perf_event_open 298 241       userfaultfd 323 282           io_uring_setup 425 425
io_uring_enter 426 426        io_uring_register 427 427     fanotify_init 300 262
inotify_init 253 -            inotify_init1 294 26          personality 135 92
modify_ldt 154 -              iopl 172 -                    ioperm 173 -
mbind 237 235                 set_mempolicy 238 237         migrate_pages 256 238
move_pages 279 239            vmsplice 278 75               acct 163 89
syslog 103 116                quotactl 179 60               quotactl_fd 443 443
swapon 167 224                swapoff 168 225               reboot 169 142
kexec_load 246 104            kexec_file_load 320 294       init_module 175 105
finit_module 313 273          delete_module 176 106         settimeofday 164 170
clock_settime 227 112         adjtimex 159 171              clock_adjtime 305 266
sethostname 170 161           setdomainname 171 162         uselib 134 -
sysfs 139 -                   vhangup 153 58                lookup_dcookie 212 18
"""
"""Refused with EPERM: name, number on x86-64, number on 64-bit ARM; "-" where a call does not
exist."""
_CLONE, _CLONE3, _SOCKET = (56, 220), (435, 435), (41, 198)


def is_known(machine: str = platform.machine()) -> bool:
    """Returns whether the filter speaks this processor's numbers."""
    return machine in _ARCHES


def program(machine: str = platform.machine()) -> bytes:
    """Returns the filter as classic BPF, 8 bytes an instruction."""
    column = list(_ARCHES).index(machine)
    refuse, allow = _step(_RETURN, _ERROR | _EPERM), _step(_RETURN, _ALLOW)
    # A 32-bit call has numbers of its own, to which the table below would not apply.
    steps = [
        _step(_LOAD, _ARCH),
        _step(_EQUAL, _ARCHES[machine], 1, 0),
        _step(_RETURN, _KILL),
        _step(_LOAD, _NUMBER),
    ]
    if machine == "x86_64":
        steps += [_step(_AT_LEAST, _X32, 0, 1), refuse]
    for number in _DENIED.split()[1 + column :: 3]:
        if number != "-":
            steps += [_step(_EQUAL, int(number), 0, 1), refuse]
    # "No such call" makes the C library fall back to clone, whose flags can be read here.
    steps += [_step(_EQUAL, _CLONE3[column], 0, 1), _step(_RETURN, _ERROR | _ENOSYS)]
    # Threads, not processes; sockets within the sandbox, which event loops need, and no others.
    argument = _step(_LOAD, _FIRST_ARGUMENT)
    for numbers, is_allowed in (
        (_CLONE, _step(_ANY_BIT, _CLONE_THREAD, 0, 1)),
        (_SOCKET, _step(_EQUAL, _AF_UNIX, 0, 1)),
    ):
        steps += [_step(_EQUAL, numbers[column], 0, 4), argument, is_allowed, allow, refuse]
    return b"".join([*steps, allow])


def install(libc: ctypes.CDLL) -> None:
    """Puts the filter on this thread and all that it starts, for good; raises OSError where the
    kernel refuses."""

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("steps", ctypes.c_char_p))

    steps = program()
    filled = Program(len(steps) // 8, steps)
    # The kernel takes a filter of an unprivileged process under the first of these alone.
    no_new_privileges, set_seccomp, by_filter = 38, 22, 2
    for arguments in (
        (no_new_privileges, 1, 0, 0, 0),
        (set_seccomp, by_filter, ctypes.addressof(filled), 0, 0),
    ):
        if libc.prctl(arguments[0], *map(ctypes.c_ulong, arguments[1:])) != 0:
            raise OSError(ctypes.get_errno(), "the kernel refuses the filter of system calls")


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)
