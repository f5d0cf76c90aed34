# shellcheck shell=bash
# Programs that mount archives: tarfs, the usual tools, and the limits.
#
# TARFS and BENCHES name the programs. The program bare serves a tree from memory, which is the least
# that FUSE can cost. A contender is called as it is shown in tables. tarfs with arguments is a contender,
# too; "saved" as its first argument says that there is an index.

readonly contenders=(tarfs 'tarfs saved' materialize ratarmount 'ratarmount saved' archivemount
    fuse-archive squashfuse erofs bare tmpfs)
# The programs behind them, whose versions count.
# shellcheck disable=SC2034 # For lib/race.sh.
readonly contender_programs=(ratarmount archivemount fuse-archive squashfuse mksquashfs mkfs.erofs
    fio nginx)

# Whether contender $1 is installed.
is_available() {
    case $1 in
    ratarmount*) command -v ratarmount >/dev/null ;;
    archivemount | fuse-archive) command -v "$1" >/dev/null ;;
    squashfuse) command -v squashfuse >/dev/null && command -v mksquashfs >/dev/null ;;
    erofs) command -v mkfs.erofs >/dev/null && kernel_has erofs ;;
    *) true ;;
    esac
}

kernel_has() {
    modprobe "$1" 2>/dev/null || true
    grep -qw "$1" /proc/filesystems
}

# Whether contender $1 can show an archive on network $3: tarfs and ratarmount speak HTTP.
is_supported() {
    case $1:$3 in
    tarfs* | materialize:* | ratarmount* | *:none) true ;;
    *) false ;;
    esac
}

# Whether contender $1 is tarfs, which has to show everything.
is_tarfs() { [[ $1 == tarfs* || $1 == materialize ]]; }

# Whether contender $1 begins with an index that an earlier run has saved.
is_saved() { [[ $1 == *' saved' || $1 == *' saved '* ]]; }

# The shell line with which contender $1 shows the archive at $2 on the directory $3. Images and the
# tree are in the directory $4; saved state and whatever else it makes goes to $4/cache, or for tarfs
# to TARFS_CACHE_DIR.
mount_line() {
    local options=${1#tarfs}
    case $1 in
    tarfs*) echo "'$TARFS' mount ${options# saved} '$2' '$3'" ;;
    materialize)
        echo "mkdir '$4/cache/tree' &&" \
            "'$TARFS' materialize -q --numeric-owner '$2' -C '$4/cache/tree' &&" \
            "mount --bind '$4/cache/tree' '$3'"
        ;;
    # With a URL it refuses to go to the background by itself.
    ratarmount*)
        echo "{ ratarmount -f --index-file '$4/cache/index.sqlite' '$2' '$3' &" \
            "until grep -qF ' $3 ' /proc/self/mountinfo; do" \
            "kill -0 \$! && sleep 0.005 || exit 1; done; }"
        ;;
    archivemount) echo "archivemount -o readonly,nobackup '$2' '$3'" ;;
    fuse-archive) echo "fuse-archive '$2' '$3'" ;;
    squashfuse) echo "squashfuse '$4/squashfs' '$3'" ;;
    erofs) echo "mount -t erofs -o loop,ro '$4/erofs' '$3'" ;;
    bare)
        echo "{ '$BENCHES/bare' '$4/tree' '$3' &" \
            "until grep -qF ' $3 ' /proc/self/mountinfo; do" \
            "kill -0 \$! && sleep 0.005 || exit 1; done; }"
        ;;
    tmpfs) echo "mount --bind '$4/tree' '$3'" ;;
    esac
}

# The shell line that leaves there the index with which contender $1 begins.
save_line() {
    case $1 in
    tarfs*) echo "'$TARFS' index '$2'" ;;
    ratarmount*) echo "$(mount_line "$@") && umount '$3'" ;;
    esac
}

# Makes the image that contender $1 mounts, from the tree in the directory $2, if it mounts images.
# Without its image the contender fails to mount.
make_image() {
    case $1 in
    squashfuse)
        mksquashfs "$2/tree" "$2/squashfs" -comp lz4 -no-progress -quiet >/dev/null 2>&1 ||
            say "mksquashfs fails: exit code $?"
        ;;
    erofs)
        # mkfs.erofs 1.5 ends at a name of 255 bytes.
        mkfs.erofs --quiet --exclude-regex='[^/]{255}' "$2/erofs" "$2/tree" >/dev/null 2>&1 ||
            say "mkfs.erofs fails: exit code $?"
        ;;
    esac
}
