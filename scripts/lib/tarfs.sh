# shellcheck shell=bash
# The program itself: where its binary is, and what it needs of the machine.

# Fails unless there is a Rust that builds the program. Called before anything is installed.
need_cargo() {
    local needed found
    needed=$(sed -n 's/^rust-version = "\(.*\)"$/\1/p' "$project/Cargo.toml")
    command -v cargo >/dev/null ||
        fail "cargo is missing: install Rust $needed or later with rustup"
    found=$(cd "$project" && cargo --version | awk '{ print $2 }')
    printf '%s\n' "$needed" "$found" | sort -C -V ||
        fail "Rust $found is too old: $needed or later is needed (rustup update stable)"
}

# The same for a script that builds the program only if TARFS names no binary.
need_cargo_or_tarfs() {
    [[ -n ${TARFS:-} ]] || need_cargo
}

# Sets TARFS to the release binary, building it unless the caller named one.
find_tarfs() {
    if [[ -z ${TARFS:-} ]]; then
        need_cargo
        TARFS=$(cd "$project" && realpath -m "${CARGO_TARGET_DIR:-target}")/release/tarfs
        [[ -x $TARFS ]] || announce "building tarfs" "5 minutes"
        (cd "$project" && cargo build --release --locked)
    fi
    [[ -x $TARFS ]] || fail "TARFS=$TARFS is not a program"
    TARFS=$(realpath "$TARFS")
    export TARFS
}

# Sets BENCHES to a directory that holds the programs of tests/bench by their names, building them
# unless the caller named one. The arguments are the programs that are needed.
find_benches() {
    if [[ -z ${BENCHES:-} ]]; then
        need_cargo
        BENCHES=$(cd "$project" && realpath -m "${CARGO_TARGET_DIR:-target}")/release/benches
        [[ -d $BENCHES ]] || announce "building the benchmarks" "5 minutes"
        mkdir -p "$BENCHES"
        local name program
        while read -r name program; do
            ln -sf "$program" "$BENCHES/$name"
        done < <(build_benches "$@")
    fi
    for name; do
        [[ -x $BENCHES/$name ]] || fail "BENCHES=$BENCHES has no program $name"
    done
    export BENCHES
}

# Builds the named benchmarks and prints "name program" for each: cargo gives them names of its own.
build_benches() {
    (cd "$project" && cargo build --release --locked --message-format=json-render-diagnostics \
        "${@/#/--bench=}") |
        sed -n 's/.*"kind":\["bench"\].*"name":"\([^"]*\)".*"executable":"\([^"]*\)".*/\1 \2/p'
}

need_fuse() {
    [[ -c /dev/fuse ]] || as_root modprobe fuse 2>/dev/null || true
    [[ -c /dev/fuse ]] ||
        fail "/dev/fuse is missing and 'modprobe fuse' did not bring it: tarfs cannot mount here." \
            "In a container, start it with --device /dev/fuse --cap-add SYS_ADMIN."
    # The file can be there and yet be closed to this container.
    (: <>/dev/fuse) 2>/dev/null || as_root bash -c ': <>/dev/fuse' 2>/dev/null ||
        fail "/dev/fuse is there, but opening it is not permitted"
}

# Fails unless mount namespaces can be made. unshare makes the root private, which must be a mount point for that.
need_mount_namespaces() {
    local said
    said=$(as_root unshare --mount true 2>&1) ||
        fail "mount namespaces cannot be made ($said). In a chroot, bind-mount the root directory onto itself" \
            "before chroot; in a container, add --cap-add SYS_ADMIN."
}

# Unmounts $1 however its daemon fares; nothing to do when it is no mount.
release_mount() {
    mountpoint -q "$1" 2>/dev/null || [[ $(stat "$1" 2>&1) == *'not connected'* ]] || return 0
    "${TARFS:-tarfs}" umount "$1" 2>/dev/null || fusermount3 -u -z "$1" 2>/dev/null ||
        as_root umount -l "$1" 2>/dev/null || true
}
