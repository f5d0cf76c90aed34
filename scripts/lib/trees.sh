# shellcheck shell=bash
# Trees of files as test input: the unusual files that archives must carry, and how trees are
# packed and unpacked for reference.

# The reference for "faithful": GNU tar, with flags that keep everything.
tar_everything=(--xattrs '--xattrs-include=*' --acls)

# Whether the filesystem of directory $1 keeps everything that the trees hold.
is_faithful_filesystem() {
    local probe faithful=0
    probe=$(mktemp -d "$1/probe.XXXXXX")
    touch "$probe/file" &&
        setfattr -n user.probe -v 1 "$probe/file" &&
        setfattr -n trusted.probe -v 1 "$probe/file" &&
        setcap cap_net_raw+ep "$probe/file" &&
        setfacl -m u:1234:r "$probe/file" &&
        mknod "$probe/null" c 1 3 || faithful=1
    remove_tree "$probe"
    return "$faithful"
}

need_faithful_filesystem() {
    is_faithful_filesystem "$1" ||
        fail "the filesystem of $1 ($(stat -f -c %T "$1")) lacks user or trusted attributes," \
            "capabilities, ACLs or device nodes; choose another directory (ext4, xfs, btrfs)"
}

# Adds one of every kind of unusual file below the directory $1.
add_special_files() (
    mkdir -p "$1"
    cd "$1" || exit 1
    add_kinds
    add_modes_and_owners
    add_links
    add_attributes
    add_holes
    add_names
    add_times
)

add_kinds() {
    mkdir kinds
    mknod kinds/null c 1 3
    mknod kinds/loop b 7 259
    mknod kinds/large-numbers c 511 70000
    mkfifo kinds/fifo
    mkdir kinds/empty-directory
    : >kinds/empty-file
}

add_modes_and_owners() {
    mkdir modes
    install -m 4755 /bin/true modes/setuid
    install -m 2755 /bin/true modes/setgid
    install -m 0000 /etc/hostname modes/nobody-may
    mkdir -m 1777 modes/sticky
    mkdir modes/read-only
    echo content >modes/read-only/file
    chmod 0555 modes/read-only
    echo content >modes/owned
    chown 1234:5678 modes/owned
    # Beyond the seven octal digits of a ustar header.
    echo content >modes/owned-by-large-ids
    chown 3000000:4000000000 modes/owned-by-large-ids
}

add_links() {
    mkdir links links/other
    echo content >links/a-first-name
    ln links/a-first-name links/second-name
    ln links/a-first-name links/other/third-name
    ln -s a-first-name links/relative
    ln -s /etc/passwd links/absolute
    ln -s nowhere links/dangling
    ln -s "$(printf 'long/%.0s' {1..60})end" links/long-target
    ln -P links/relative links/hard-link-to-symlink
    ln kinds/fifo links/hard-link-to-fifo
    chown -h 1234:5678 links/relative
}

add_attributes() {
    mkdir attributes
    cp /bin/true attributes/capable
    setcap cap_net_raw,cap_net_bind_service+ep attributes/capable
    echo content >attributes/user
    setfattr -n user.comment -v 'hello, world' attributes/user
    setfattr -n user.binary -v 0x00010a3d20ff attributes/user
    setfattr -n user.empty attributes/user
    setfattr -n trusted.secret -v hidden attributes/user
    mkdir attributes/directory
    setfattr -n user.comment -v directory attributes/directory
    echo content >attributes/acl
    setfacl -m u:1234:rw,g:5678:r,m::rw attributes/acl
    mkdir attributes/acl-directory
    setfacl -m u:1234:rwx -d -m u:1234:rwx,g:5678:rx attributes/acl-directory
    touch attributes/acl-directory/inherits
}

add_holes() {
    mkdir holes
    truncate -s 5M holes/nothing-but-a-hole
    truncate -s 20M holes/many
    local offset
    for offset in 0 1 3 9 12; do
        head -c 100000 /bin/bash |
            dd of=holes/many bs=1M seek="$offset" conv=notrunc status=none
    done
    # More pieces than the headers of one record hold.
    truncate -s 8M holes/comb
    for offset in {0..99..2}; do
        echo "tooth $offset" | dd of=holes/comb bs=65536 seek="$offset" conv=notrunc status=none
    done
    truncate -s 1M holes/data-at-the-end
    echo end >>holes/data-at-the-end
    printf 'x' | dd of=holes/odd-size bs=1 seek=1234567 status=none
}

add_names() {
    mkdir names
    : >names/$'latin-1 caf\xe9'
    : >names/$'newline\nand\ttab'
    : >names/'--looks-like-an-option'
    : >names/'back\slash and space '
    : >names/"$(printf 'n%.0s' {1..255})"
    local deep
    deep=names/$(printf 'directory-%.0s/' {1..40})
    mkdir -p "$deep"
    echo deep >"$deep/file"
    : >names/'größe-✓'
}

# Last, as everything else changes times.
add_times() {
    mkdir times times/directory
    touch -d '1969-12-31 23:59:58.123456789 UTC' times/before-the-epoch
    touch -d '1912-06-23 00:00:00 UTC' times/long-before
    touch -d '2025-01-02 03:04:05.000000001 UTC' times/one-nanosecond
    touch -d '2200-01-01 00:00:00.999999999 UTC' times/far-future
    touch -d '1970-01-01 00:00:00 UTC' times/epoch
    ln -s nowhere times/link
    touch -h -d '2001-02-03 04:05:06.700000000 UTC' times/link
    touch -d '2011-12-13 14:15:16.171819202 UTC' times/directory
}

# Makes of $1.tar every compressed form, the quick ones first. xz -T1 gives one block, -T2 many.
compress_all() {
    local name=$1
    make_once "$name.tar.lz4" compress "$name.tar" lz4 -q
    make_once "$name-linked.tar.lz4" compress "$name.tar" lz4 -q -BD
    make_once "$name.tar.zst" compress "$name.tar" zstd -q -3 -T2
    make_once "$name.tar.gz" compress "$name.tar" gzip -6 -n
    make_once "$name.tar.bz2" compress "$name.tar" bzip2
    make_once "$name-t2.tar.xz" compress "$name.tar" xz -1 -T2
    make_once "$name.tar.xz" compress "$name.tar" xz -1 -T1
}

# The data set that the archive $1 packs, from its name.
set_of() {
    local set=${1##*/}
    set=${set%%.tar*}
    set=${set%-linked}
    echo "${set%-t2}"
}

# Runs "$2 ... > $1", unless $1 is there already; half of a file never bears the name.
make_once() {
    local file=$1
    shift
    [[ -e $file ]] && return
    timed "${file##*/}" "$@" >"$file.part"
    mv "$file.part" "$file"
}

# Packs the directory $1 on stdout.
pack() { tar --format=posix --sparse "${tar_everything[@]}" -C "$1" -cf - .; }

# Through a pipe, as archives are usually made: no size is known beforehand.
compress() {
    local file=$1
    shift
    # shellcheck disable=SC2002 # The point is that the compressor cannot look at the file.
    cat "$file" | "$@"
}

# The flag by which GNU tar decompresses when it reads from a pipe.
tar_option() {
    case $1 in
    *.gz) echo -z ;;
    *.lz4) echo -Ilz4 ;;
    *.zst) echo --zstd ;;
    *.xz) echo -J ;;
    *.bz2) echo -j ;;
    esac
}

# Unpacks $1.tar by GNU tar as $1.ref, what all others are compared with.
make_reference() {
    [[ -e $1.ref ]] && return
    remove_tree "$1.ref.part"
    mkdir "$1.ref.part"
    timed "${1##*/}.ref" tar -xp --numeric-owner --delay-directory-restore \
        "${tar_everything[@]}" -C "$1.ref.part" -f "$1.tar"
    mv "$1.ref.part" "$1.ref"
}
