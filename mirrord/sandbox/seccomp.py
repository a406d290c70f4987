"""The system call filter of sandboxes: docker's default profile for a process without
capabilities.

Differences: calls of another ABI (32-bit, x32) do not exist; calls by which a process reaches
another's memory, which docker allows, may not name the sandbox's pid 1.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Iterable, Iterator
from enum import Enum
from functools import cache
from typing import NamedTuple

from ..errors import BackendUnavailableError


class _Machine(NamedTuple):
    audit: int  # AUDIT_ARCH_* of linux/audit.h
    column: int  # of the table


_MACHINES = {"x86_64": _Machine(0xC000003E, 0), "aarch64": _Machine(0xC00000B7, 1)}

# linux/bpf_common.h
_LOAD, _JUMP_EQUAL, _JUMP_GREATER, _JUMP_SET, _RETURN = 0x20, 0x15, 0x25, 0x45, 0x06
# offsets in struct seccomp_data; of an argument the lower half, because these are ints
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
# linux/seccomp.h: SECCOMP_RET_ALLOW, and SECCOMP_RET_ERRNO with the errno in its lower half
_ALLOW = 0x7FFF0000
_REFUSE = 0x00050000 | errno.EPERM
_ABSENT = 0x00050000 | errno.ENOSYS

_NEW_NAMESPACES = 0x7E020000  # CLONE_NEW* of clone(2)
# linux/socket.h
_AF_UNIX, _AF_ALG, _AF_VSOCK = 1, 38, 40
# none, UNAME26, PER_LINUX32, both, and the question
_PERSONALITIES = (0x0, 0x20000, 0x8, 0x20008, 0xFFFFFFFF)
_INIT = 1  # bwrap's process in the sandbox, on which the end of its command depends


class _Check(NamedTuple):
    """Compare an argument with values; what matches none is decided by `otherwise`."""

    argument: int
    jump: int
    values: tuple[int, ...]
    matched: int
    otherwise: int


_SOCKET = "socket=41/198"
CHECKS = {
    "clone=56/220": _Check(0, _JUMP_SET, (_NEW_NAMESPACES,), _REFUSE, _ALLOW),
    _SOCKET: _Check(0, _JUMP_EQUAL, (_AF_ALG, _AF_VSOCK), _REFUSE, _ALLOW),
    "personality=135/92": _Check(0, _JUMP_EQUAL, _PERSONALITIES, _ALLOW, _REFUSE),
    "ptrace=101/117": _Check(1, _JUMP_EQUAL, (_INIT,), _REFUSE, _ALLOW),
    "process_vm_readv=310/270": _Check(0, _JUMP_EQUAL, (_INIT,), _REFUSE, _ALLOW),
    "process_vm_writev=311/271": _Check(0, _JUMP_EQUAL, (_INIT,), _REFUSE, _ALLOW),
    "prlimit64=302/261": _Check(0, _JUMP_EQUAL, (_INIT,), _REFUSE, _ALLOW),
}
# Its flags are in memory, where a filter cannot look; the C library falls back to clone.
_CLONE3 = 435

# NAME=NUMBER, or NAME=X86_64/AARCH64
# from seccomp/default.json of github.com/moby/profiles, June 2026
ALLOWED = """
accept=43/202 accept4=288/242 access=21/ adjtimex=159/171 alarm=37/ arch_prctl=158/ bind=49/200
brk=12/214 cachestat=451 capget=125/90 capset=126/91 chdir=80/49 chmod=90/ chown=92/
clock_adjtime=305/266 clock_getres=229/114 clock_gettime=228/113 clock_nanosleep=230/115 close=3/57
close_range=436 connect=42/203 copy_file_range=326/285 creat=85/ dup=32/23 dup2=33/ dup3=292/24
epoll_create=213/ epoll_create1=291/20 epoll_ctl=233/21 epoll_pwait=281/22 epoll_pwait2=441
epoll_wait=232/ eventfd=284/ eventfd2=290/19 execve=59/221 execveat=322/281 exit=60/93
exit_group=231/94 faccessat=269/48 faccessat2=439 fadvise64=221/223 fallocate=285/47
fanotify_mark=301/263 fchdir=81/50 fchmod=91/52 fchmodat=268/53 fchmodat2=452 fchown=93/55
fchownat=260/54 fcntl=72/25 fdatasync=75/83 fgetxattr=193/10 flistxattr=196/13 flock=73/32 fork=57/
fremovexattr=199/16 fsetxattr=190/7 fstat=5/80 fstatfs=138/44 fsync=74/82 ftruncate=77/46
futex=202/98 futex_requeue=456 futex_wait=455 futex_waitv=449 futex_wake=454 futimesat=261/
get_robust_list=274/100 get_thread_area=211/ getcpu=309/168 getcwd=79/17 getdents=78/
getdents64=217/61 getegid=108/177 geteuid=107/175 getgid=104/176 getgroups=115/158 getitimer=36/102
getpeername=52/205 getpgid=121/155 getpgrp=111/ getpid=39/172 getppid=110/173 getpriority=140/141
getrandom=318/278 getresgid=120/150 getresuid=118/148 getrlimit=97/163 getrusage=98/165
getsid=124/156 getsockname=51/204 getsockopt=55/209 gettid=186/178 gettimeofday=96/169
getuid=102/174 getxattr=191/8 getxattrat=464 inotify_add_watch=254/27 inotify_init=253/
inotify_init1=294/26 inotify_rm_watch=255/28 io_cancel=210/3 io_destroy=207/1 io_getevents=208/4
io_pgetevents=333/292 io_setup=206/0 io_submit=209/2 ioctl=16/29 ioprio_get=252/31 ioprio_set=251/30
kill=62/129 landlock_add_rule=445 landlock_create_ruleset=444 landlock_restrict_self=446 lchown=94/
lgetxattr=192/9 link=86/ linkat=265/37 listen=50/201 listmount=458 listxattr=194/11 listxattrat=465
llistxattr=195/12 lremovexattr=198/15 lseek=8/62 lsetxattr=189/6 lstat=6/ madvise=28/233
map_shadow_stack=453 membarrier=324/283 memfd_create=319/279 memfd_secret=447 mincore=27/232
mkdir=83/ mkdirat=258/34 mknod=133/ mknodat=259/33 mlock=149/228 mlock2=325/284 mlockall=151/230
mmap=9/222 modify_ldt=154/ mprotect=10/226 mq_getsetattr=245/185 mq_notify=244/184 mq_open=240/180
mq_timedreceive=243/183 mq_timedsend=242/182 mq_unlink=241/181 mremap=25/216 mseal=462 msgctl=71/187
msgget=68/186 msgrcv=70/188 msgsnd=69/189 msync=26/227 munlock=150/229 munlockall=152/231
munmap=11/215 name_to_handle_at=303/264 nanosleep=35/101 newfstatat=262/79 open=2/ openat=257/56
openat2=437 pause=34/ pidfd_open=434 pidfd_send_signal=424 pipe=22/ pipe2=293/59 pkey_alloc=330/289
pkey_free=331/290 pkey_mprotect=329/288 poll=7/ ppoll=271/73 prctl=157/167 pread64=17/67
preadv=295/69 preadv2=327/286 process_mrelease=448 pselect6=270/72 pwrite64=18/68 pwritev=296/70
pwritev2=328/287 read=0/63 readahead=187/213 readlink=89/ readlinkat=267/78 readv=19/65
recvfrom=45/207 recvmmsg=299/243 recvmsg=47/212 remap_file_pages=216/234 removexattr=197/14
removexattrat=466 rename=82/ renameat=264/38 renameat2=316/276 restart_syscall=219/128 rmdir=84/
rseq=334/293 rt_sigaction=13/134 rt_sigpending=127/136 rt_sigprocmask=14/135 rt_sigqueueinfo=129/138
rt_sigreturn=15/139 rt_sigsuspend=130/133 rt_sigtimedwait=128/137 rt_tgsigqueueinfo=297/240
sched_get_priority_max=146/125 sched_get_priority_min=147/126 sched_getaffinity=204/123
sched_getattr=315/275 sched_getparam=143/121 sched_getscheduler=145/120
sched_rr_get_interval=148/127 sched_setaffinity=203/122 sched_setattr=314/274 sched_setparam=142/118
sched_setscheduler=144/119 sched_yield=24/124 seccomp=317/277 select=23/ semctl=66/191 semget=64/190
semop=65/193 semtimedop=220/192 sendfile=40/71 sendmmsg=307/269 sendmsg=46/211 sendto=44/206
set_robust_list=273/99 set_thread_area=205/ set_tid_address=218/96 setfsgid=123/152 setfsuid=122/151
setgid=106/144 setgroups=116/159 setitimer=38/103 setpgid=109/154 setpriority=141/140
setregid=114/143 setresgid=119/149 setresuid=117/147 setreuid=113/145 setrlimit=160/164
setsid=112/157 setsockopt=54/208 setuid=105/146 setxattr=188/5 setxattrat=463 shmat=30/196
shmctl=31/195 shmdt=67/197 shmget=29/194 shutdown=48/210 sigaltstack=131/132 signalfd=282/
signalfd4=289/74 socketpair=53/199 splice=275/76 stat=4/ statfs=137/43 statmount=457 statx=332/291
symlink=88/ symlinkat=266/36 sync=162/81 sync_file_range=277/84 syncfs=306/267 sysinfo=99/179
tee=276/77 tgkill=234/131 time=201/ timer_create=222/107 timer_delete=226/111
timer_getoverrun=225/109 timer_gettime=224/108 timer_settime=223/110 timerfd_create=283/85
timerfd_gettime=287/87 timerfd_settime=286/86 times=100/153 tkill=200/130 truncate=76/45
umask=95/166 uname=63/160 unlink=87/ unlinkat=263/35 uretprobe=335/ utime=132/ utimensat=280/88
utimes=235/ vfork=58/ vmsplice=278/75 wait4=61/260 waitid=247/95 write=1/64 writev=20/66
"""
# removexattrat of Linux 6.13; programs fall back from later calls, which answer ENOSYS
_NEWEST = 466


def machine() -> str:
    """Return the kernel's name of this machine."""
    return os.uname().machine


class Sockets(Enum):
    """Which sockets a process may make; a pair that is connected already always."""

    ALL = frozenset[int]()
    NOT_LOCAL = frozenset({_AF_UNIX})
    NONE = None


@cache
def program(sockets: Sockets = Sockets.ALL) -> bytes:
    """Return the filter for this machine as struct sock_filter[], which bwrap takes.

    Raises BackendUnavailableError if there is none for it.
    """
    name = machine()
    if (host := _MACHINES.get(name)) is None:
        raise BackendUnavailableError(
            f"cannot make a sandbox: there is no system call filter for {name}",
            hint=f"run it on {' or '.join(_MACHINES)}",
        )
    return b"".join(struct.pack("=HBBI", *line) for line in _lines(host, sockets))


# An instruction: its code, the jumps if it is true and false, its operand.
_Line = tuple[int, int, int, int]


def _lines(machine: _Machine, sockets: Sockets) -> Iterator[_Line]:
    yield _LOAD, 0, 0, _ARCHITECTURE
    yield _JUMP_EQUAL, 1, 0, machine.audit
    yield _RETURN, 0, 0, _ABSENT
    yield _LOAD, 0, 0, _NUMBER
    for word, check in (CHECKS | _sockets(sockets)).items():
        lines = list(_check(check))
        yield _JUMP_EQUAL, 0, len(lines), _numbers([word], machine.column)[0]
        yield from lines
    verdicts = dict.fromkeys(_numbers(ALLOWED.split(), machine.column), _ALLOW)
    verdicts[_CLONE3] = _ABSENT
    for last, verdict in _ranges(verdicts):
        yield _JUMP_GREATER, 1, 0, last
        yield _RETURN, 0, 0, verdict
    yield _RETURN, 0, 0, _ABSENT


def _sockets(sockets: Sockets) -> dict[str, _Check]:
    if sockets is Sockets.NONE:
        return {_SOCKET: _Check(0, _JUMP_EQUAL, (), _REFUSE, _REFUSE)}
    refused = (*CHECKS[_SOCKET].values, *sockets.value)
    return {_SOCKET: CHECKS[_SOCKET]._replace(values=refused)}


def _check(check: _Check) -> Iterator[_Line]:
    yield _LOAD, 0, 0, _ARGUMENTS + 8 * check.argument
    for value in check.values:
        yield check.jump, 0, 1, value
        yield _RETURN, 0, 0, check.matched
    yield _RETURN, 0, 0, check.otherwise


def _numbers(words: Iterable[str], column: int) -> list[int]:
    """Return the numbers of the calls that a machine has."""
    columns = [word.partition("=")[2].split("/") for word in words]
    return [int(number) for numbers in columns if (number := numbers[column % len(numbers)])]


def _ranges(verdicts: dict[int, int]) -> Iterator[tuple[int, int]]:
    """Join neighbours of one verdict; yield the last number of each range, and its verdict."""
    for number in range(_NEWEST + 1):
        verdict = verdicts.get(number, _REFUSE)
        if number == _NEWEST or verdicts.get(number + 1, _REFUSE) != verdict:
            yield number, verdict
