"""Mounts a clone of the mount sys.argv[1] on sys.argv[2], with owners that are 100000 higher.

Runs the command in the other arguments as user 7 and group 8 of the user namespace of that mapping.
"""

import ctypes
import os
import sys

LIBC = ctypes.CDLL(None, use_errno=True)
OPEN_TREE, MOVE_MOUNT, MOUNT_SETATTR = 428, 429, 442
CLONE_NEWUSER = 0x10000000
OPEN_TREE_CLONE, AT_EMPTY_PATH, AT_FDCWD = 1, 0x1000, -100
MOVE_MOUNT_F_EMPTY_PATH = 4
MOUNT_ATTR_IDMAP = 0x00100000


class Attributes(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "namespace")]


def call(name, result):
    if result < 0:
        number = ctypes.get_errno()
        sys.exit(f"{name}: {os.strerror(number)}")
    return result


ready, done = os.pipe(), os.pipe()
child = os.fork()
if child == 0:
    call("unshare", LIBC.unshare(CLONE_NEWUSER))
    os.write(ready[1], b"x")
    os.close(done[1])
    os.read(done[0], 1)
    if sys.argv[3:]:
        os.setgid(8)
        os.setuid(7)
        os.execvp(sys.argv[3], sys.argv[3:])
    os._exit(0)
os.read(ready[0], 1)
for kind in ("uid_map", "gid_map"):
    with open(f"/proc/{child}/{kind}", "w") as file:
        file.write("0 100000 65536")
namespace = os.open(f"/proc/{child}/ns/user", os.O_RDONLY)
tree = call("open_tree", LIBC.syscall(OPEN_TREE, AT_FDCWD, sys.argv[1].encode(), OPEN_TREE_CLONE))
attributes = Attributes(MOUNT_ATTR_IDMAP, 0, 0, namespace)
call(
    "mount_setattr",
    LIBC.syscall(
        MOUNT_SETATTR, tree, b"", AT_EMPTY_PATH, ctypes.byref(attributes), ctypes.sizeof(attributes)
    ),
)
call(
    "move_mount",
    LIBC.syscall(MOVE_MOUNT, tree, b"", AT_FDCWD, sys.argv[2].encode(), MOVE_MOUNT_F_EMPTY_PATH),
)
os.close(done[1])
os.waitpid(child, 0)
