# shellcheck shell=bash
# shellcheck disable=SC2154 # work and lib are set by the scripts that source this.
# Programs that run a shell's words in a root file system, and what lets them where limits are low and
# systemd does not run. Source lib/common.sh before this, and set work, a directory
# for what they need.

# In a mount namespace of one's own: gives crun and podman control groups of version 2 alone (version 1, or
# both beside each other, as where systemd does not run, they refuse), no containers of other users, and no
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

# In a mount namespace of one's own: gives it a copy of /etc that can be changed. A tmpfs holds the changes,
# because an overlay cannot hold those of another one.
make_own_etc() {
    mkdir "$work/etc"
    mount -t tmpfs containers "$work/etc"
    mkdir "$work/etc/upper" "$work/etc/work"
    mount -t overlay -o "lowerdir=/etc,upperdir=$work/etc/upper,workdir=$work/etc/work" overlay /etc
}

# In a mount namespace whose /etc and /dev/fuse are its own: adds an ordinary user with subordinate IDs and
# the home $work/user. The program $work/bin/as-user runs a command as that user, at home.
add_container_user() {
    readonly user_name=tarfs-user user_id=12345
    local file
    echo "$user_name:x:$user_id:$user_id::$work/user:/bin/sh" >>/etc/passwd
    echo "$user_name:x:$user_id:" >>/etc/group
    for file in /etc/subuid /etc/subgid; do echo "$user_name:1000000:65536" >"$file"; done
    # So that rootless podman sees what is mounted while it runs.
    mount --make-rshared /
    chmod a+x "$work"
    mkdir -p "$work/bin" "$work/user/run" "$work/user/tmp"
    chmod 700 "$work/user/run"
    chown -R "$user_id:$user_id" "$work/user"
    # Where that user may read it.
    cp -L "$TARFS" "$work/bin/tarfs"
    cat >"$work/bin/as-user" <<END
#!/bin/sh
cd "$work/user" || exit
exec setpriv --reuid $user_id --regid $user_id --clear-groups env -i LC_ALL=C no_proxy='*' \\
    HOME="$work/user" USER=$user_name TMPDIR="$work/user/tmp" XDG_RUNTIME_DIR="$work/user/run" \\
    PATH="$work/bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin" \\
    CONTAINERS_CONF="$CONTAINERS_CONF" "\$@"
END
    chmod 755 "$work/bin/as-user"
}

# Ends the process that podman keeps for that user, and with it the mounts in its user namespace.
remove_container_user() {
    if [[ -x $work/bin/as-user ]]; then
        "$work/bin/as-user" podman system migrate >/dev/null 2>&1 || true
        rm "$work/bin/as-user"
    fi
}

# Mounts a device for FUSE that any user may open, as on most machines.
open_fuse_to_everyone() {
    mknod -m 666 "$work/fuse" c 10 229
    mount --bind "$work/fuse" /dev/fuse
}

# Runs the shell's words $3 as root in the root $2 by the runner $1: crun, bwrap or podman. With
# $container_network=host in the network of the host.
run_container() { "run_by_$1" "$2" "$3"; }

run_by_crun() {
    local bundle
    bundle=$(mktemp -d "$work/bundle.XXXXXX")
    "$lib/oci-config" "$1" "$2" "${container_network:-}" >"$bundle/config.json"
    crun --cgroup-manager=disabled run --bundle "$bundle" "tarfs-${bundle##*.}"
}

run_by_bwrap() {
    bwrap --bind "$1" / --proc /proc --dev /dev --unshare-pid --cap-add ALL --clearenv \
        --setenv PATH /usr/sbin:/usr/bin:/sbin:/bin --setenv LC_ALL C --chdir / /bin/sh -c "$2"
}

run_by_podman() {
    podman run --rm --network "${container_network:-none}" --rootfs "$1" /bin/sh -c "$2"
}
