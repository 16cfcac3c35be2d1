"""The system calls that code in the bubblewrap sandbox may make, as a seccomp filter.

Namespaces hide the host already; the filter leaves what computing in one process needs: files,
memory, threads, clocks, pipes and pairs of connected sockets. Whatever it does not name is refused,
calls of later kernels included. So nothing is held by the kernel beyond the limits of a call:
without `sendmsg`, `setsockopt` and `listen` a descriptor, of which a call has few, holds one
buffer of ordinary size.
"""

from __future__ import annotations

import ctypes
import platform
import struct
from collections.abc import Mapping, Sequence

_LOAD = 0x20
_EQUAL = 0x15
_AT_LEAST = 0x35
_MORE = 0x25
_ANY_BIT = 0x45
_RETURN = 0x06
_AND = 0x54
_NUMBER = 0
_ARCH = 4
_ARGUMENTS = (16, 24)
_ALLOW = 0x7FFF0000
_ERROR = 0x00050000
_KILL = 0x80000000
_EPERM = 1
_ENOTTY = 25
_ENOLCK = 37
_ENOSYS = 38

_ARCHES: Mapping[str, int] = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_ALLOWED = """
read 0 63; write 1 64; readv 19 65; writev 20 66; pread64 17 67; pwrite64 18 68; preadv 295 69
pwritev 296 70; preadv2 327 286; pwritev2 328 287; lseek 8 62; sendfile 40 71
copy_file_range 326 285; open 2 -; openat 257 56; openat2 437 437; creat 85 -; close 3 57
close_range 436 436; dup 32 23; dup2 33 -; dup3 292 24; pipe 22 -; pipe2 293 59; stat 4 -
lstat 6 -; fstat 5 80; newfstatat 262 79; statx 332 291; access 21 -; faccessat 269 48
faccessat2 439 439; getdents 78 -; getdents64 217 61; getcwd 79 17; chdir 80 49; fchdir 81 50
mkdir 83 -; mkdirat 258 34; rmdir 84 -; unlink 87 -; unlinkat 263 35; rename 82 -; renameat 264 38
renameat2 316 276; link 86 -; linkat 265 37; symlink 88 -; symlinkat 266 36; readlink 89 -
readlinkat 267 78; chmod 90 -; fchmod 91 52; fchmodat 268 53; fchmodat2 452 452; umask 95 166
truncate 76 45; ftruncate 77 46; fallocate 285 47; fadvise64 221 223; fsync 74 82; fdatasync 75 83
utime 132 -; utimes 235 -; futimesat 261 -; utimensat 280 88; getxattr 191 8; lgetxattr 192 9
fgetxattr 193 10; listxattr 194 11; llistxattr 195 12; flistxattr 196 13; select 23 -
pselect6 270 72; poll 7 -; ppoll 271 73; epoll_create 213 -; epoll_create1 291 20
epoll_ctl 233 21; epoll_wait 232 -; epoll_pwait 281 22; epoll_pwait2 441 441; eventfd 284 -
eventfd2 290 19; timerfd_create 283 85; timerfd_settime 286 86; timerfd_gettime 287 87
sendto 44 206; recvfrom 45 207; recvmsg 47 212; shutdown 48 210; getsockopt 55 209
getsockname 51 204; getpeername 52 205; mmap 9 222; munmap 11 215; mremap 25 216; mprotect 10 226
madvise 28 233; msync 26 227; brk 12 214; futex 202 98; set_robust_list 273 99
get_robust_list 274 100; set_tid_address 218 96; rseq 334 293; exit 60 93; exit_group 231 94
wait4 61 260; waitid 247 95; rt_sigaction 13 134; rt_sigprocmask 14 135; rt_sigreturn 15 139
rt_sigpending 127 136; rt_sigsuspend 130 133; rt_sigtimedwait 128 137; sigaltstack 131 132
restart_syscall 219 128; pause 34 -; kill 62 129; tkill 200 130; tgkill 234 131; alarm 37 -
getitimer 36 102; setitimer 38 103; timer_create 222 107; timer_settime 223 110
timer_gettime 224 108; timer_getoverrun 225 109; timer_delete 226 111; time 201 -
gettimeofday 96 169; clock_gettime 228 113; clock_getres 229 114; clock_nanosleep 230 115
nanosleep 35 101; times 100 153; getrusage 98 165; sched_yield 24 124; sched_getaffinity 204 123
sched_getparam 143 121; sched_getscheduler 145 120; sched_get_priority_max 146 125
sched_get_priority_min 147 126; getpriority 140 141; getcpu 309 168; getrlimit 97 163
setrlimit 160 164; prlimit64 302 261; uname 63 160; getrandom 318 278; getpid 39 172
getppid 110 173; gettid 186 178; getpgid 121 155; getpgrp 111 -; getsid 124 156; getuid 102 174
geteuid 107 175; getgid 104 176; getegid 108 177; getresuid 118 148; getresgid 120 150
getgroups 115 158
"""
"""Name, number on x86-64, number on 64-bit ARM; "-" where a call does not exist."""
_NEWER = 424
"""From here on all processors number alike, and every call is younger than the programs that do
without it: those fall back where the kernel says that it has no such call (clone3 to clone)."""

_CLONE = (56, 220)
_CLONE_THREAD = 0x10000
_SOCKETPAIR = (53, 199)
_AF_UNIX = 1
_SOCK_KIND = 0xF
_SOCK_STREAM = 1
_FLOCK = (73, 32)
_IOCTL = (16, 29)
_FCNTL = (72, 25)
_PRCTL = (157, 167)
_IOCTLS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451, 0x40049409)
"""TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX, FICLONE."""
_FCNTLS = (0, 1, 2, 3, 4, 5, 1030, 1032)
"""F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, F_GETLK, F_DUPFD_CLOEXEC, F_GETPIPE_SZ."""
_SET_LOCKS = (6, 7)
"""F_SETLK, F_SETLKW."""
_PRCTLS = (15, 16)
"""PR_SET_NAME, PR_GET_NAME."""


def is_known(machine: str = platform.machine()) -> bool:
    """Returns whether the filter speaks this processor's numbers."""
    return machine in _ARCHES


def program(machine: str = platform.machine()) -> bytes:
    """Returns the filter as classic BPF, 8 bytes an instruction."""
    column = list(_ARCHES).index(machine)
    allow = _step(_RETURN, _ALLOW)
    refuse = _error(_EPERM)
    # A 32-bit call has numbers of its own, to which the table would not apply.
    steps = [
        _step(_LOAD, _ARCH),
        _step(_EQUAL, _ARCHES[machine], 1, 0),
        _step(_RETURN, _KILL),
        _step(_LOAD, _NUMBER),
    ]
    first, second = (_step(_LOAD, offset) for offset in _ARGUMENTS)
    done = _error(0)
    for numbers, checks in (
        # Threads, not processes.
        (_CLONE, [first, _step(_ANY_BIT, _CLONE_THREAD, 0, 1), allow, refuse]),
        # What event loops wake themselves with. Datagrams would queue without a reader's bound.
        (
            _SOCKETPAIR,
            [
                first,
                _step(_EQUAL, _AF_UNIX, 0, 4),
                second,
                _step(_AND, _SOCK_KIND),
                _step(_EQUAL, _SOCK_STREAM, 0, 1),
                allow,
                refuse,
            ],
        ),
        # Its locks would lie on files that the host and other sandboxes share.
        (_FLOCK, [_error(_ENOLCK)]),
        # Granted without being made: a call is one process, whose own locks never exclude it, and
        # the kernel would hold them in memory that no limit counts. SQLite asks for them.
        (_FCNTL, [second, *_among(_SET_LOCKS, done), *_among(_FCNTLS, allow), refuse]),
        (_IOCTL, [second, *_among(_IOCTLS, allow), _error(_ENOTTY)]),
        (_PRCTL, [first, *_among(_PRCTLS, allow), refuse]),
    ):
        steps += [_step(_EQUAL, numbers[column], 0, len(checks)), *checks]
    for low, high in _runs(allowed(machine)):
        steps += [_step(_AT_LEAST, low, 0, 2), _step(_MORE, high, 1, 0), allow]
    return b"".join([*steps, _step(_AT_LEAST, _NEWER, 0, 1), _error(_ENOSYS), refuse])


def allowed(machine: str = platform.machine()) -> list[int]:
    """Returns the numbers of the calls that pass whatever their arguments, ascending."""
    column = list(_ARCHES).index(machine)
    calls = _ALLOWED.replace(";", "\n").strip().splitlines()
    found = []
    for call in calls:
        number = call.split()[1 + column]
        if number != "-":
            found.append(int(number))
    return sorted(found)


def install(libc: ctypes.CDLL) -> None:
    """Puts the filter on this thread and all that it starts, for good; raises OSError where the
    kernel refuses."""

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("steps", ctypes.c_char_p))

    steps = program()
    filled = Program(len(steps) // 8, steps)
    # The kernel takes a filter of an unprivileged process under the first of these alone.
    no_new_privileges = 38
    set_seccomp = 22
    by_filter = 2
    for arguments in (
        (no_new_privileges, 1, 0, 0, 0),
        (set_seccomp, by_filter, ctypes.addressof(filled), 0, 0),
    ):
        if libc.prctl(arguments[0], *map(ctypes.c_ulong, arguments[1:])) != 0:
            raise OSError(ctypes.get_errno(), "the kernel refuses the filter of system calls")


def _among(values: Sequence[int], then: bytes) -> list[bytes]:
    found = []
    for value in values:
        found += [_step(_EQUAL, value, 0, 1), then]
    return found


def _runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Returns the first and last number of each run without gaps."""
    lows = [number for number in numbers if number - 1 not in numbers]
    highs = [number for number in numbers if number + 1 not in numbers]
    return list(zip(lows, highs, strict=True))


def _error(number: int) -> bytes:
    return _step(_RETURN, _ERROR | number)


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)
