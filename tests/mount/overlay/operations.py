"""Runs all kinds of file operations on the overlay in the working directory, and prints the results.

Prints a line for each operation: its name, and its result or errno. Omits values that may differ between
two trees of the same files, such as inode and device numbers and times of today.
"""

import ctypes
import errno
import fcntl
import mmap
import os
import select
import stat
import struct
import subprocess
import sys

LIBC = ctypes.CDLL(None, use_errno=True)
USER = 1234
RENAME_NOREPLACE, RENAME_EXCHANGE, RENAME_WHITEOUT = 1, 2, 4
AT_FDCWD = -100
ACL = "system.posix_acl_access"


def report(name, work, *arguments):
    try:
        result = work(*arguments)
    except OSError as error:
        result = errno.errorcode.get(error.errno, error)
    print(f"{name}: {result}", flush=True)


def called(result):
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def rename(old, new, flags):
    return called(LIBC.renameat2(AT_FDCWD, old.encode(), AT_FDCWD, new.encode(), flags))


def content(path):
    with open(path, "rb") as file:
        return file.read()


def digest(path):
    bytes = content(path)
    return len(bytes), hash_of(bytes)


def hash_of(bytes):
    import hashlib

    return hashlib.sha256(bytes).hexdigest()[:16]


def append(path, bytes):
    with open(path, "ab") as file:
        file.write(bytes)
    return content(path)[-20:]


def touch(path):
    open(path, "x").close()


def looks(path):
    found = os.lstat(path)
    looks = oct(found.st_mode), found.st_uid, found.st_gid
    return looks if stat.S_ISDIR(found.st_mode) else (*looks, found.st_size, found.st_nlink)


def attributes(path):
    names = os.listxattr(path, follow_symlinks=False)
    return {name: os.getxattr(path, name, follow_symlinks=False) for name in sorted(names)}


def as_user(work, *arguments):
    """Returns the report of `work`, run as another user."""
    ends = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(ends[1], 1)
        os.setgroups([])
        os.setgid(USER)
        os.setuid(USER)
        report("", work, *arguments)
        os._exit(0)
    os.close(ends[1])
    with os.fdopen(ends[0]) as said:
        text = said.read()
    os.waitpid(child, 0)
    return text.strip(": \n")


def run(*words):
    done = subprocess.run(words, capture_output=True, text=True, errors="replace")
    return done.returncode, done.stdout, done.stderr


def reading():
    report("listing", lambda: sorted(os.listdir(".")))
    kinds = {True: "as they are", False: "wrong"}
    right = all(entry.inode() == os.lstat(entry.path).st_ino for entry in os.scandir("dir"))
    report("numbers in a listing", lambda: kinds[right])
    for path in sorted(os.listdir(".")):
        report(f"looks of {path}", looks, path)
        report(f"attributes of {path}", attributes, path)
    report("a link", os.readlink, "link")
    report("big", digest, "big")
    report("nothing there", os.stat, "nothing")
    report("a file is no directory", os.stat, "a/b")
    report("a long name", os.stat, "n" * 256)
    report("a directory to be read", lambda: os.read(os.open("dir", os.O_RDONLY), 1))
    report("not a link", os.readlink, "a")
    report("no attribute", os.getxattr, "a", "user.none")


def holes():
    with open("sparse", "rb") as file:
        size = os.fstat(file.fileno()).st_size
        data = os.lseek(file.fileno(), 0, os.SEEK_DATA)
        print("sparse:", size, data, os.lseek(file.fileno(), data, os.SEEK_HOLE))
        report("behind the end", os.lseek, file.fileno(), size + 1, os.SEEK_DATA)


def mapping():
    with open("big", "rb") as file:
        shared = mmap.mmap(file.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_READ)
        print("shared:", hash_of(shared[:]))
        private = mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
        private[0:4] = b"mine"
        print("private:", private[0:4] == b"mine", shared[0:4] == b"mine")
        report(
            "shared and writable",
            lambda: mmap.mmap(file.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_WRITE),
        )


def moving():
    source = os.open("big", os.O_RDONLY)
    size = os.fstat(source).st_size
    ends = os.pipe()
    report("splice", lambda: hash_of(os.read(ends[0], os.splice(source, ends[1], 4096))))
    target = os.open("sent", os.O_RDWR | os.O_CREAT)
    os.lseek(source, 0, os.SEEK_SET)
    sent = 0
    while sent < size:
        sent += os.sendfile(target, source, sent, size - sent)
    report("sendfile", digest, "sent")
    target = os.open("copied", os.O_RDWR | os.O_CREAT)
    report("copy_file_range", lambda: (os.copy_file_range(source, target, 4096, 0, 0), digest("copied")))
    again = os.open("again.copied", os.O_RDWR | os.O_CREAT)
    report("of what is new", lambda: os.copy_file_range(target, again, 4096, 0, 0))
    for flag in (os.O_RDONLY, os.O_RDWR):
        direct = os.open("big", flag | os.O_DIRECT)
        page = mmap.mmap(-1, 8192)
        report("O_DIRECT", lambda: (os.preadv(direct, [page], 4096), hash_of(page[:])))
        os.close(direct)
    report("advice", lambda: os.posix_fadvise(source, 0, 0, os.POSIX_FADV_WILLNEED))
    report("fsync", os.fsync, source)
    report("fdatasync", os.fdatasync, source)
    directory = os.open("dir", os.O_RDONLY)
    report("fsync of a directory", os.fsync, directory)


def locks():
    one, two = (os.open("dir/f1", os.O_RDONLY) for _ in range(2))
    report("flock", fcntl.flock, one, fcntl.LOCK_EX | fcntl.LOCK_NB)
    report("flock again", fcntl.flock, two, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(one)
    report("flock once free", fcntl.flock, two, fcntl.LOCK_EX | fcntl.LOCK_NB)
    report("lock to read", fcntl.lockf, two, fcntl.LOCK_SH | fcntl.LOCK_NB)
    report("lock to write", fcntl.lockf, two, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def other():
        mine = os.open("acl", os.O_RDONLY)
        fcntl.lockf(mine, fcntl.LOCK_SH | fcntl.LOCK_NB)

    held = os.open("acl", os.O_RDWR)
    fcntl.lockf(held, fcntl.LOCK_EX)
    child = os.fork()
    if child == 0:
        report("a lock of another process", other)
        os._exit(0)
    os.waitpid(child, 0)


def watching():
    watch = called(LIBC.inotify_init1(0))
    for path in (b"dir", b"dir/f1"):
        called(LIBC.inotify_add_watch(watch, path, 0x3FF))
    content("dir/f1")
    append("dir/f1", b"more")
    os.mkdir("dir/made")
    events = []
    while select.select([watch], [], [], 0.1)[0]:
        buffer = os.read(watch, 4096)
        while buffer:
            _, mask, _, length = struct.unpack("iIII", buffer[:16])
            events.append((hex(mask), buffer[16 : 16 + length].strip(b"\0")))
            buffer = buffer[16 + length :]
    print("events:", events)


def copying_up():
    old = os.open("a", os.O_RDONLY)
    number = os.stat("a").st_ino
    report("append", append, "a", b"more\n")
    report("its number", lambda: os.stat("a").st_ino == number)
    report("read by who had it open", lambda: os.pread(old, 100, 0))
    report("truncate", lambda: (os.truncate("dir/f2", 2), content("dir/f2")))
    report("truncate at opening", lambda: open("dir/sub/f3", "wb").write(b"new"))
    for path, mode in (("mode", 0o2751), ("suid", 0o6711), ("dir/sub", 0o1700)):
        report(f"chmod {path}", lambda: (os.chmod(path, mode), looks(path)))
    for path in ("caps", "mode", "suid", "acl", "link", "fifo", "null"):
        report(f"chown {path}", lambda: (os.lchown(path, 9, 10), looks(path), attributes(path)))
    report("times", lambda: (os.utime("exe", (7, 8)), os.stat("exe").st_mtime))
    report("set", lambda: (os.setxattr("attr", "user.y", b"2"), attributes("attr")))
    report("replace", os.setxattr, "attr", "user.none", b"", os.XATTR_REPLACE)
    report("create", os.setxattr, "attr", "user.x", b"", os.XATTR_CREATE)
    report("remove", lambda: (os.removexattr("attr", "user.x"), attributes("attr")))
    report("remove what is not there", os.removexattr, "attr", "user.x")
    report("trusted", lambda: (os.setxattr("attr", "trusted.t", b"3"), attributes("attr")))
    report("the overlay's own", os.setxattr, "attr", "trusted.overlay.opaque", b"y")
    report("attributes of a directory", lambda: os.setxattr("dir", "user.z", b"4"))
    report("inherited", lambda: (os.mkdir("acls/new", 0o777), attributes("acls/new")))
    report("inherited by a file", lambda: (touch("acls/f"), attributes("acls/f"), looks("acls/f")))
    report("less of an ACL", lambda: (os.removexattr("acls", ACL), attributes("acls"), looks("acls")))
    report("allocate", lambda: os.posix_fallocate(os.open("sparse", os.O_RDWR), 0, 1 << 20))


def linking():
    report("one of two links", append, "hard1", b"x")
    report("it", looks, "hard1")
    report("the other", lambda: (looks("hard2"), content("hard2")))
    report("a new link", lambda: (os.link("hard3", "hard5"), looks("hard3"), looks("hard4")))
    report("over the new one", append, "hard5", b"y")
    report("both", lambda: (content("hard3"), content("hard4")))
    report("link to a link", lambda: os.link("dangling", "again", follow_symlinks=False))
    report("link to a directory", os.link, "dir", "no")
    report("unlink a link", lambda: (os.unlink("hard4"), looks("hard3")))


def renaming():
    report("rename", os.rename, "move/f1", "move/g")
    report("rename over", os.rename, "move/f2", "move/f3")
    report("rename a link", os.rename, "move/l", "move/m")
    report("rename a directory", os.rename, "move/d", "move/e")
    report("rename it over an empty one", os.rename, "move/d2", "empty")
    report("rename it over a full one", os.rename, "move/d3", "full")
    report("a directory over a file", os.rename, "move/d4", "move/g")
    report("a file over a directory", os.rename, "move/g", "move/d4")
    report("into itself", os.rename, "move", "move/x")
    report("not over", rename, "move/g", "move/f3", RENAME_NOREPLACE)
    report("exchange", rename, "move/g", "move/f3", RENAME_EXCHANGE)
    report("exchange directories", rename, "move/d3", "move/d4", RENAME_EXCHANGE)
    report("leave a whiteout", rename, "move/f4", "move/f5", RENAME_WHITEOUT)
    report("move", lambda: walk("move"))
    os.mkdir("fresh")
    report("rename a new directory", os.rename, "fresh", "fresher")
    report("a full one into it", os.rename, "full/sub", "fresher/sub")


def walk(top):
    return sorted(os.path.join(*found) for found in flat(top))


def flat(top):
    for path, directories, files in os.walk(top):
        for name in directories + files:
            yield path, name


def removing():
    report("rmdir what is full", os.rmdir, "gone")
    report("unlink a directory", os.unlink, "gone")
    report("rmdir a file", os.rmdir, "attr")
    for path in ("gone/f1", "gone/sub/f2"):
        report("unlink", os.unlink, path)
    report("rmdir", lambda: (os.rmdir("gone/sub"), os.rmdir("gone")))
    report("what is gone", os.stat, "gone")
    report("made again", lambda: (os.mkdir("gone"), os.listdir("gone")))
    report("in it", os.stat, "gone/f1")
    report("a file for a directory", lambda: (os.rmdir("gone"), touch("gone"), looks("gone")))
    report("mkdir over something", os.mkdir, "a")
    report("symlink over something", os.symlink, "x", "a")
    report("symlink", lambda: (os.symlink("x", "new-link"), os.readlink("new-link")))
    report("a whiteout of one's own", os.mknod, "white", stat.S_IFCHR | 0o644, os.makedev(0, 0))
    report("a device", os.mknod, "zero", stat.S_IFCHR | 0o644, os.makedev(1, 5))
    report("its zeros", lambda: os.read(os.open("zero", os.O_RDONLY), 4))
    report("a device of the archive", lambda: os.write(os.open("null", os.O_WRONLY), b"1234"))
    unnamed = os.open(".", os.O_TMPFILE | os.O_RDWR, 0o640)
    os.write(unnamed, b"unnamed")
    report("O_TMPFILE", lambda: os.link(f"/proc/self/fd/{unnamed}", "named"))
    report("exclusive", os.open, "attr", os.O_CREAT | os.O_EXCL)


def running():
    report("a program", run, "./exe", "-u")
    report("set-user-id", as_user, run, "./suid", "-un")
    report("capabilities", attributes, "caps")
    library = ctypes.CDLL(os.path.abspath("library.so"))
    library.cos.restype = ctypes.c_double
    print("library:", library.cos(ctypes.c_double(0)))
    child = subprocess.Popen(["./sleep", "30"])
    report("written while it runs", os.open, "sleep", os.O_WRONLY)
    child.kill()
    child.wait()
    report("copied while it does not run", lambda: (append("sleep", b"")[:0], run("./sleep", "0")))


def others():
    for path in ("closed", "mode", "a", "dir/f1", "acl", "private/f", "link"):
        for flag in (os.O_RDONLY, os.O_WRONLY):
            result = as_user(lambda: os.close(os.open(path, flag)))
            print(f"{path} for another user, {flag}: {result}")
    report("list", as_user, os.listdir, "private")
    report("make", as_user, os.mkdir, "by-user")
    report("make in a sticky one", as_user, os.mkdir, "sticky/by-user")
    report("unlink in it", as_user, os.unlink, "sticky/of-root")
    report("chmod", as_user, os.chmod, "a", 0o777)
    report("chown one's own", as_user, os.chown, "of-user", 0, 0)
    report("chmod one's own", as_user, os.chmod, "of-user", 0o600)
    report("write to one's own", as_user, append, "of-user", b"more")
    report("access", lambda: [os.access("closed", how) for how in (os.R_OK, os.W_OK, os.X_OK)])


def whole():
    found = os.statvfs(".")
    print("statvfs:", found.f_namemax, found.f_bfree > 0)
    devices = {os.lstat(path).st_dev for path in [os.path.join(*pair) for pair in flat(".")]}
    print("devices:", len(devices))
    print("find:", run("find", ".", "-xdev")[1].count("\n"))
    # After the caches are dropped, changed files still exist and unchanged files keep their inode numbers.
    unchanged = ("closed", "private/f", "library.so", "full/f", "empty")
    numbers = [os.lstat(path).st_ino for path in unchanged]
    with open("/proc/sys/vm/drop_caches", "w") as caches:
        caches.write("2")
    print("all that is forgotten:", len(walk(".")), run("find", ".", "-ls")[2])
    print("numbers:", numbers == [os.lstat(path).st_ino for path in unchanged])


def main():
    sys.stdout.reconfigure(line_buffering=True)
    os.umask(0o022)
    reading()
    holes()
    mapping()
    running()
    moving()
    locks()
    watching()
    others()
    copying_up()
    linking()
    renaming()
    removing()
    whole()
    sys.stdout.flush()
    os._exit(0)


main()
