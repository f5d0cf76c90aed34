# shellcheck shell=bash
# shellcheck disable=SC2154 # work and lib are set by the scripts that source this.
# Programs that run a shell's words in a root file system, and what lets them where limits are low and
# systemd does not run. Whoever sources this has sourced lib/common.sh, and has set work, a directory
# for what they need.

# In a mount namespace of one's own: gives crun and podman control groups of version 2 alone (version 1, or
# both beside each other, as where systemd does not run, they refuse), nobody else's containers, and no
# groups and limits for each of theirs, which may be out of reach where this itself runs in one.
let_containers_run() {
    if [[ $(stat -f -c %T /sys/fs/cgroup) != cgroup2fs ]]; then
        umount -R /sys/fs/cgroup 2>/dev/null || true
        mount -t cgroup2 cgroup2 /sys/fs/cgroup
    fi
    mkdir -p /var/lib/containers
    local place
    for place in /run /var/lib/containers; do mount -t tmpfs containers "$place"; done
    cat >"$work/containers.conf" <<'END'
[containers]
cgroups = "disabled"
default_ulimits = ["nofile=1024:4096", "nproc=1024:1024"]
END
    unset XDG_RUNTIME_DIR
    export CONTAINERS_CONF=$work/containers.conf
}

# Runs the shell's words $3 as root in the root $2 by the runner $1: crun, bwrap or podman.
run_container() { "run_by_$1" "$2" "$3"; }

run_by_crun() {
    local bundle
    bundle=$(mktemp -d "$work/bundle.XXXXXX")
    "$lib/oci-config" "$1" "$2" >"$bundle/config.json"
    crun --cgroup-manager=disabled run --bundle "$bundle" "tarfs-${bundle##*.}"
}

run_by_bwrap() {
    bwrap --bind "$1" / --proc /proc --dev /dev --unshare-pid --cap-add ALL --clearenv \
        --setenv PATH /usr/sbin:/usr/bin:/sbin:/bin --setenv LC_ALL C --chdir / /bin/sh -c "$2"
}

run_by_podman() { podman run --rm --network none --rootfs "$1" /bin/sh -c "$2"; }
