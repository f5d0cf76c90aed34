# shellcheck shell=bash
# A systemd of one's own, with nothing but its manager, its journal and the units that are put there: in
# namespaces, with /dev, /run, /etc/systemd/system and process numbers of its own. Network and other files
# are those of the caller. Source lib/common.sh before this, as root in a mount namespace
# of its own with control groups of version 2 (let_containers_run), and set work, a directory.

# Debian's units that take part: none that would touch the hardware or the rest of the
# system.
readonly machine_parts=(sysinit.target basic.target multi-user.target network.target network-online.target
    network-pre.target local-fs.target local-fs-pre.target remote-fs.target remote-fs-pre.target
    shutdown.target umount.target final.target sockets.target timers.target paths.target slices.target
    poweroff.target systemd-poweroff.service systemd-journald.service systemd-journald.socket
    systemd-journald-dev-log.socket)

# Starts it, with the units that the arguments are besides, and waits until it is up.
machine_start() {
    local part group=/sys/fs/cgroup/tarfs-machine.$$
    # More than one may be started, one after the other.
    machine_dir=$(mktemp --directory "$work/machine.XXXXXX")
    chmod 755 "$machine_dir"
    mkdir -p "$machine_dir"/{dev,units,generators} "$group" || fail "there is no control group to be had"
    for part in "${machine_parts[@]}"; do ln -s "/lib/systemd/system/$part" "$machine_dir/units/"; done
    cp "$@" "$machine_dir/units/"
    mkdir "$machine_dir/units/sysinit.target.wants"
    for part in systemd-journald.service systemd-journald-dev-log.socket; do
        ln -s "/lib/systemd/system/$part" "$machine_dir/units/sysinit.target.wants/"
    done
    # Makes units of /etc/fstab.
    ln -s /lib/systemd/system-generators/systemd-fstab-generator "$machine_dir/generators/"
    machine_group=$group
    (
        echo "$BASHPID" >"$group/cgroup.procs"
        exec setsid unshare --mount --propagation private --pid --fork --uts --ipc --cgroup --kill-child \
            bash -c "$(declare -f machine_init); machine_init \"\$1\"" machine "$machine_dir"
    ) >"$machine_dir/console" 2>&1 </dev/null &
    machine_starter=$!
    local tries
    for ((tries = 0; tries < 300; tries++)); do
        sleep 0.1
        machine_pid=$(cat "/proc/$machine_starter/task/$machine_starter/children" 2>/dev/null) || break
        machine_pid=${machine_pid// /}
        # The manager answers, and has started all that it is to start.
        if [[ -n $machine_pid && -S /proc/$machine_pid/root/run/systemd/private ]] &&
            [[ $(in_machine systemctl is-system-running 2>/dev/null) == running ]]; then
            return
        fi
    done
    cat "$machine_dir/console" >&2
    fail "systemd does not come up; what it says is above"
}

# Prepares the first process before it executes systemd.
machine_init() {
    set -eu
    local machine_dir=$1 node
    mount -t proc proc /proc
    # systemd does not touch read-only files.
    mount --bind /proc/sys /proc/sys
    mount -o remount,bind,ro /proc/sys
    umount /sys/fs/cgroup
    mount -o remount,bind,ro /sys
    mount -t cgroup2 cgroup2 /sys/fs/cgroup
    mount -t tmpfs -o mode=755 machine "$machine_dir/dev"
    for node in null zero full random urandom tty fuse autofs; do
        touch "$machine_dir/dev/$node"
        [ ! -e "/dev/$node" ] || mount --bind "/dev/$node" "$machine_dir/dev/$node"
    done
    mkdir "$machine_dir/dev/pts" "$machine_dir/dev/shm"
    mount -t devpts -o newinstance,ptmxmode=0666 devpts "$machine_dir/dev/pts"
    ln -s pts/ptmx "$machine_dir/dev/ptmx"
    ln -s /proc/self/fd "$machine_dir/dev/fd"
    mount --move "$machine_dir/dev" /dev
    mount -t tmpfs -o mode=755 machine /run
    mkdir -p /run/lock /etc/systemd/system
    mount -t tmpfs -o mode=755 machine /etc/systemd/system
    hostname machine
    # As in any container it asks for no password and loads no module.
    exec env -i PATH="$PATH" container=tarfs \
        SYSTEMD_UNIT_PATH="/etc/systemd/system:/run/systemd/system:/run/systemd/generator:$machine_dir/units" \
        SYSTEMD_GENERATOR_PATH="$machine_dir/generators" \
        /lib/systemd/systemd --unit=multi-user.target --log-target=console --show-status=false
}

# Runs a command in there, in the current directory.
in_machine() {
    # shellcheck disable=SC2016 # The inner shell expands these.
    nsenter --target "$machine_pid" --mount --pid --uts --ipc --cgroup \
        bash -c 'cd "$1" && shift && exec "$@"' bash "$PWD" \
        env SYSTEMD_UNIT_PATH="/etc/systemd/system:/run/systemd/system:/run/systemd/generator:$machine_dir/units" \
        SYSTEMD_PAGER=cat SYSTEMD_COLORS=0 "$@"
}

# Shuts it down as a system: its processes get SIGTERM, and are then killed. By force if it takes long.
machine_stop() {
    [[ -n ${machine_starter:-} ]] || return 0
    local tries
    in_machine systemctl poweroff --force >/dev/null 2>&1 || true
    for ((tries = 0; tries < 200; tries++)); do
        kill -0 "$machine_starter" 2>/dev/null || break
        sleep 0.1
    done
    # Once that is gone so is the machine, and its number may be another process'.
    kill -KILL "$machine_starter" 2>/dev/null || true
    wait "$machine_starter" 2>/dev/null || true
    machine_starter=
    # A process that was killed there may take a moment to end.
    for ((tries = 0; tries < 20; tries++)); do
        find "$machine_group" -depth -type d -exec rmdir {} \; 2>/dev/null || true
        [[ -d $machine_group ]] || return 0
        sleep 0.1
    done
}
