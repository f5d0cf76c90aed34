# shellcheck shell=bash
# shellcheck disable=SC2154 # work and lib are set by the scripts that source this.
# Programs that run a shell's words in a root file system. Whoever sources this has sourced
# lib/common.sh, and has set work, a directory for what they need.

# Runs the shell's words $3 as root in the root $2 by the runner $1: crun, bwrap or podman.
run_container() { "run_by_$1" "$2" "$3"; }

# crun knows version 2 of cgroups, or version 1, and refuses both beside each other, as on machines
# where systemd does not run; there it gets version 2 alone, in a mount namespace of its own.
run_by_crun() {
    local bundle
    bundle=$(mktemp -d "$work/bundle.XXXXXX")
    "$lib/oci-config" "$1" "$2" >"$bundle/config.json"
    local crun=(crun --cgroup-manager=disabled run --bundle "$bundle" "tarfs-${bundle##*.}")
    if [[ -d /sys/fs/cgroup/unified ]]; then
        # shellcheck disable=SC2016 # The inner shell expands these.
        unshare --mount sh -c 'umount -R /sys/fs/cgroup && mount -t cgroup2 cgroup2 /sys/fs/cgroup &&
            exec "$@"' sh "${crun[@]}"
    else
        "${crun[@]}"
    fi
}

run_by_bwrap() {
    bwrap --bind "$1" / --proc /proc --dev /dev --unshare-pid --cap-add ALL --clearenv \
        --setenv PATH /usr/sbin:/usr/bin:/sbin:/bin --setenv LC_ALL C --chdir / /bin/sh -c "$2"
}

run_by_podman() { podman run --rm --network none --rootfs "$1" /bin/sh -c "$2"; }
