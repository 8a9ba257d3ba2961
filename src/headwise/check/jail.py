"""The jail around a learner's file: what the process that runs it can see, reach and start.

Built before torch is imported, because torch starts threads and a process with threads cannot enter a new user
namespace. Every layer is optional for the kernel, so `enter` returns those that are active:

    namespaces   its own users, network, processes and mounts: all files read-only, an empty home in memory
    landlock     only Python, its packages and the learner's project can be read; only the home can be written
    seccomp      no sockets, no new processes, no tracing, no mounting
    limits       processor time, memory, file size

Plain ctypes on system calls, without root.
"""

import contextlib
import ctypes
import errno
import os
import platform
import resource
import shutil
import signal
import struct
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

MEMORY = 6 * 2**30  # address space; torch alone maps more than 2 GiB
FILES = 64 * 2**20
HOME_BYTES = 256 * 2**20
OTHERWISE = {  # what a missing layer leaves open
    "namespaces": "see other processes and outlive the check",
    "landlock": "read your files",
    "seccomp": "open sockets and start processes",
}
WRAPPED = "HEADWISE_BUBBLEWRAP"  # set inside bubblewrap
SYSTEM = (
    "/usr", "/lib", "/lib32", "/lib64", "/bin", "/sbin", "/nix", "/etc/ld.so.cache", "/etc/ld.so.conf",
    "/etc/ld.so.conf.d", "/etc/localtime", "/etc/nsswitch.conf",
    "/etc/fonts", "/etc/mime.types", "/etc/alternatives", "/sys/devices/system", "/sys/fs/cgroup",
    "/dev/urandom", "/dev/random",
)  # fmt: skip
PROCESS = ("/proc/self", "/proc/cpuinfo", "/proc/meminfo", "/proc/stat", "/proc/filesystems", "/proc/sys")
MOST_ENTRIES = 4096  # of one folder that are made readable

# Namespaces and mounts: constants of <sched.h>, <sys/mount.h> and <sys/prctl.h>.
NEW_USER, NEW_PID, NEW_NET, NEW_IPC, NEW_UTS, NEW_MOUNT = (
    0x10000000, 0x20000000, 0x40000000, 0x08000000, 0x04000000, 0x00020000,
)  # fmt: skip
NOSUID, NODEV, NOEXEC, RECURSIVE, PRIVATE = 0x2, 0x4, 0x8, 0x4000, 0x40000
MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE = 442, -100, 0x8000
ATTR_READ_ONLY, ATTR_NOSUID = 0x1, 0x2
SET_DEATH_SIGNAL, SET_SECCOMP, DROP_BOUNDING, SET_NO_NEW_PRIVILEGES = 1, 22, 24, 38


class UnavailableError(OSError):
    """A layer that this kernel does not offer."""


def limit(seconds: float) -> None:
    """Limit processor time, memory and file size."""
    limits = {
        resource.RLIMIT_CPU: (int(4 * seconds) + 1, int(4 * seconds) + 2),
        resource.RLIMIT_AS: (MEMORY, MEMORY),
        resource.RLIMIT_FSIZE: (FILES, FILES),
        resource.RLIMIT_CORE: (0, 0),
    }
    for kind, most in limits.items():
        with contextlib.suppress(ValueError, OSError):  # macOS refuses some
            resource.setrlimit(kind, most)


def enter(home: str, readable: list[str], *, starts_processes: bool = False) -> list[str]:
    """Build the jail around this process, which must have one thread; returns the active layers, in the order above.

    Where the kernel forbids namespaces and bubblewrap is installed, this process starts again inside it.

    Args:
        home: the folder that can be written; an empty one in memory is mounted over it.
        readable: files and folders of the learner that can be read, except hidden entries of those folders.
        starts_processes: whether new processes are allowed, as a compiler needs.
    """
    if sys.platform != "linux":
        return ["limits"]
    layers = []
    with contextlib.suppress(OSError):
        if not os.environ.get(WRAPPED):
            _enter_namespaces(home)
        layers.append("namespaces")
    _drop_privileges()
    with contextlib.suppress(OSError):
        _restrict_files(home, readable, private_processes=bool(layers))
        layers.append("landlock")
    with contextlib.suppress(OSError):
        _restrict_calls(starts_processes)
        layers.append("seccomp")
    return [*layers, "limits"]


def missing(layers: Iterable[str]) -> list[str]:
    """What code could still do if some of the layers are missing, in words."""
    held = set(layers)
    return [words for layer, words in OTHERWISE.items() if layer not in held]


# System calls.


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _check(result: int) -> int:
    """The result of a system call, or its error as an exception."""
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    words = [None if word is None else word.encode() for word in (source, target, kind, options)]
    _check(_libc().mount(words[0], words[1], words[2], ctypes.c_ulong(flags), words[3]))


def _prctl(option: int, value: int) -> None:
    _check(_libc().prctl(option, ctypes.c_ulong(value), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0)))


# The first layer: namespaces.


def _enter_namespaces(home: str) -> None:
    """Go on as the first process of new namespaces, in which all files but the home are read-only."""
    user, group = os.getuid(), os.getgid()
    try:
        _check(_libc().unshare(NEW_USER | NEW_PID | NEW_NET | NEW_IPC | NEW_UTS | NEW_MOUNT))
    except OSError:
        _start_again_in_bubblewrap(home)
        raise
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    _become_first_process()
    _mount(None, "/", None, RECURSIVE | PRIVATE)
    attributes = struct.pack("QQQQ", ATTR_READ_ONLY | ATTR_NOSUID, 0, 0, 0)
    _check(_libc().syscall(MOUNT_SETATTR, AT_FDCWD, b"/", AT_RECURSIVE, attributes, ctypes.c_size_t(len(attributes))))
    _mount("tmpfs", home, "tmpfs", NOSUID | NODEV, f"size={HOME_BYTES},mode=700")
    os.chdir(home)
    with contextlib.suppress(OSError):  # in a container that hides parts of /proc; then Landlock hides other processes
        _mount("proc", "/proc", "proc", NOSUID | NODEV | NOEXEC)


def _start_again_in_bubblewrap(home: str) -> None:
    """Replace this process by the same command inside bubblewrap, which may do what the kernel forbids others."""
    program = shutil.which("bwrap")
    if program is not None:
        options = ["--unshare-all", "--die-with-parent", "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc"]
        options += ["--tmpfs", home, "--chdir", home, "--setenv", WRAPPED, "1", "--"]
        os.execv(program, [program, *options, *sys.orig_argv])  # noqa: S606 - no shell


def _become_first_process() -> None:
    """Fork into the new process namespace. This process only waits; when either ends, all in the namespace end."""
    waiting = os.getpid()
    child = os.fork()
    if child == 0:
        _prctl(SET_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() not in (0, waiting):  # 0: a process outside the namespace
            os._exit(1)
        return
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    if code < 0:  # end in the same way
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _drop_privileges() -> None:
    """Give up the capabilities that a new user namespace brings, for good."""
    for capability in range(64):
        with contextlib.suppress(OSError):
            _prctl(DROP_BOUNDING, capability)
    with contextlib.suppress(OSError):
        _prctl(SET_NO_NEW_PRIVILEGES, 1)
    header, none = struct.pack("Ii", 0x20080522, 0), struct.pack("IIIIII", 0, 0, 0, 0, 0, 0)
    with contextlib.suppress(OSError):
        _check(_libc().capset(header, none))


# The second layer: Landlock.

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
FILE_RIGHTS = EXECUTE | WRITE_FILE | READ_FILE | 1 << 14  # those that make sense for a file: also truncate
RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}  # how many rights each version of Landlock knows


def _restrict_files(home: str, readable: list[str], private_processes: bool) -> None:
    version = _libc().syscall(CREATE_RULESET, None, ctypes.c_size_t(0), 1)
    if version < 1:
        raise UnavailableError("Landlock")
    every = (1 << RIGHTS[min(version, max(RIGHTS))]) - 1
    attributes = struct.pack("Q", every)
    attributes += struct.pack("Q", 0b11) if version >= 4 else b""  # binding and connecting TCP sockets
    attributes += struct.pack("Q", 0b11) if version >= 6 else b""  # signals and abstract sockets to outside
    rules = _check(_libc().syscall(CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0))
    try:
        for place in _installed():
            _allow(rules, place, (EXECUTE | READ_FILE | READ_DIR) & every)
        for place in ["/proc"] if private_processes else PROCESS:
            _allow(rules, place, (READ_FILE | READ_DIR) & every)
        for place, rights in _of_the_learner(readable):
            _allow(rules, place, rights & every)
        for place in ("/dev/null", "/dev/zero", "/dev/full"):
            _allow(rules, place, (READ_FILE | WRITE_FILE) & every)
        _allow(rules, home, every)
        _prctl(SET_NO_NEW_PRIVILEGES, 1)
        _check(_libc().syscall(RESTRICT_SELF, rules, 0))
    finally:
        os.close(rules)


def _installed() -> Iterator[str]:
    """Python, its packages, and the system's libraries."""
    yield from SYSTEM
    yield from {sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix, *sysconfig.get_paths().values()}
    yield from (entry for entry in sys.path if entry)
    yield from (entry for entry in os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep) if entry)


def _of_the_learner(readable: list[str]) -> Iterator[tuple[str, int]]:
    """The learner's files with the rights on them. Folders can be listed, but hidden entries (.ssh, .env) not read."""
    for place in readable:
        if not Path(place).is_dir():
            yield place, READ_FILE
            continue
        yield place, READ_DIR
        with contextlib.suppress(OSError), os.scandir(place) as entries:
            for entry, _ in zip(entries, range(MOST_ENTRIES), strict=False):
                if not entry.name.startswith("."):
                    yield entry.path, READ_FILE | READ_DIR


def _allow(rules: int, place: str, rights: int) -> None:
    """Allow `rights` on a file, or on a folder and all below it; nothing if it is not there."""
    try:
        opened = os.open(place, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        rights = rights if Path(place).is_dir() else rights & FILE_RIGHTS
        with contextlib.suppress(OSError):
            _check(_libc().syscall(ADD_RULE, rules, 1, struct.pack("=Qi", rights, opened), 0))
    finally:
        os.close(opened)


# The third layer: seccomp.

ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
REFUSED = {  # the number of each call on x86_64 and aarch64
    "socket": (41, 198), "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "unshare": (272, 97),
    "setns": (308, 268), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430),
    "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442),
    "keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218), "bpf": (321, 280),
    "perf_event_open": (298, 241), "userfaultfd": (323, 282), "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265), "pidfd_getfd": (438, 438), "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "kexec_load": (246, 104),
    "kexec_file_load": (320, 294), "init_module": (175, 105), "finit_module": (313, 273),
    "delete_module": (176, 106), "reboot": (169, 142), "swapon": (167, 224), "swapoff": (168, 225), "acct": (163, 89),
}  # fmt: skip
CLONE, CLONE3, FORK, VFORK, PRCTL = (56, 220), (435, 435), (57, None), (58, None), (157, 167)
LOAD, EQUAL, ABOVE, ANY_BIT, RETURN = 0x20, 0x15, 0x25, 0x45, 0x06  # instructions of the filter language
NUMBER, ARCHITECTURE, FIRST_ARGUMENT = 0, 4, 16  # offsets in what a filter sees
ALLOWED, FAILED, KILLED = 0x7FFF0000, 0x00050000, 0x80000000
THREAD = 0x00010000


def _restrict_calls(starts_processes: bool) -> None:
    if platform.machine() not in ARCHITECTURES:
        raise UnavailableError(f"seccomp on {platform.machine()}")
    program = _filter(*ARCHITECTURES[platform.machine()], starts_processes)
    data = ctypes.create_string_buffer(b"".join(program))
    filters = struct.pack("HxxxxxxP", len(program), ctypes.addressof(data))
    _prctl(SET_NO_NEW_PRIVILEGES, 1)
    _check(_libc().prctl(SET_SECCOMP, ctypes.c_ulong(2), filters, ctypes.c_ulong(0), ctypes.c_ulong(0)))


def _filter(architecture: int, column: int, starts_processes: bool) -> list[bytes]:
    """The instructions: one jump over one return for every refused call."""
    program = [
        _instruction(LOAD, ARCHITECTURE),
        _instruction(EQUAL, architecture, 1, 0),
        _instruction(RETURN, KILLED),
        _instruction(LOAD, NUMBER),
    ]
    if column == 0:  # the second table of x86_64, x32, would bypass the numbers
        program += [_instruction(ABOVE, 0x3FFFFFFF, 0, 1), _instruction(RETURN, KILLED)]
    for numbers in REFUSED.values():
        program += _refusal(numbers[column], errno.EPERM)
    program += _refusal_by_argument(PRCTL[column], EQUAL, SET_DEATH_SIGNAL, errno.EPERM, when=True)
    if not starts_processes:
        for forks in (FORK, VFORK):
            program += [] if forks[column] is None else _refusal(forks[column], errno.EAGAIN)
        program += _refusal(CLONE3[column], errno.ENOSYS)  # its flags are in memory: libc then uses clone
        program += _refusal_by_argument(CLONE[column], ANY_BIT, THREAD, errno.EAGAIN, when=False)
    return [*program, _instruction(RETURN, ALLOWED)]


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)


def _refusal(number: int | None, error: int) -> list[bytes]:
    assert number is not None  # noqa: S101 - callers leave out calls that an architecture lacks
    return [_instruction(EQUAL, number, 0, 1), _instruction(RETURN, FAILED | error)]


def _refusal_by_argument(number: int, test: int, value: int, error: int, *, when: bool) -> list[bytes]:
    """Refuse a call if `test` of its first argument gives `when`."""
    return [
        _instruction(EQUAL, number, 0, 4),
        _instruction(LOAD, FIRST_ARGUMENT),
        _instruction(test, value, 0, 1) if when else _instruction(test, value, 1, 0),
        _instruction(RETURN, FAILED | error),
        _instruction(LOAD, NUMBER),
    ]
