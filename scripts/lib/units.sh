# shellcheck shell=bash
# shellcheck disable=SC2154 # work, nginx_url and machine_dir are set by the scripts that source this.
# Tests the units of the package in a systemd of their own (lib/machine.sh). Before you source this,
# install the package, and serve $work/served, with archive.tar in it that holds a file
# of the word hello, at $nginx_url.

# Mounts of the service tarfs@$1 on /srv/$1, with the options $2 and the lines $3 for its [Service].
configure_unit() {
    in_machine mkdir -p /etc/tarfs "/srv/$1" "/run/systemd/system/tarfs@$1.service.d"
    printf '%s\n' "SOURCE=$nginx_url/archive.tar" "MOUNTPOINT=/srv/$1" "OPTIONS=$2" |
        in_machine tee "/etc/tarfs/$1.conf" >/dev/null
    # These tests cannot wait as long as a system does.
    printf '%s\n' '[Service]' 'RestartSec=100ms' 'TimeoutStopSec=2' "${3:-}" |
        in_machine tee "/run/systemd/system/tarfs@$1.service.d/try.conf" >/dev/null
    in_machine systemctl daemon-reload
}

# Fails unless what the command prints is $1; $2 says what that is about.
expect() {
    local expected=$1 about=$2 printed
    shift 2
    printed=$("$@" 2>&1) || true
    [[ $printed == "$expected" ]] || fail "$about: \`$*\` prints $printed, not $expected" \
        "$(in_machine journalctl -n 20 --no-pager 2>&1)"
}

# Fails unless the command succeeds within ten seconds.
expect_soon() {
    local tries
    for ((tries = 0; tries < 100; tries++)); do
        if "$@" >/dev/null 2>&1; then return; fi
        sleep 0.1
    done
    fail "not within ten seconds: $*" "$(in_machine journalctl -n 20 --no-pager 2>&1)"
}

property() { in_machine systemctl show -P "$1" "tarfs@$2"; }

is_mounted() { in_machine grep -q " $1 " /proc/mounts; }

# Starts the service tarfs@$1.
start() {
    in_machine systemctl start "tarfs@$1" ||
        fail "tarfs@$1 does not start: $(in_machine journalctl -n 20 --no-pager)"
}

# Keeps a process in the directory $1, until `leave`.
keep_directory_busy() {
    # shellcheck disable=SC2016 # The inner shell expands these.
    in_machine bash -c 'cd "$1" && echo $$ >/run/user.pid && exec sleep 1000' bash "$1" >/dev/null 2>&1 &
    expect_soon in_machine test -s /run/user.pid
}

release_directory() {
    # shellcheck disable=SC2016 # The inner shell expands these.
    in_machine bash -c 'kill "$(cat /run/user.pid)" && rm /run/user.pid'
}

# Whether the property $1 of the service $2 is $3.
is_property() { [[ $(property "$1" "$2") == "$3" ]]; }

# When `systemctl start` returns the mount answers, and when `systemctl stop` does it is gone.
try_service() {
    configure_unit plain '-o allow_other --memory 64MiB'
    start plain
    expect hello "a service that was started" in_machine cat /srv/plain/file
    expect running "a service that was started" property SubState plain
    expect_soon is_property StatusText plain "$nginx_url/archive.tar: complete"
    # With its priority, which is no part of it.
    expect_soon in_machine bash -c 'journalctl -u tarfs@plain -p 6..6 -o cat | grep "^ *INFO mounted"'
    in_machine systemctl stop tarfs@plain
    if is_mounted /srv/plain; then fail "a service that was stopped has left its mount"; fi
    expect success "a service that was stopped" property Result plain
    # A process in the mount does not delay the shutdown.
    start plain
    keep_directory_busy /srv/plain
    in_machine systemctl stop tarfs@plain
    if is_mounted /srv/plain; then fail "a service that was stopped while in use has left its mount"; fi
    release_directory
    echo "a service is ready when it answers, and gone when it was stopped"
}

# A killed service is restarted, or with --restart its mount is continued under the same main process.
try_kills() {
    start plain
    in_machine kill -KILL "$(property MainPID plain)"
    expect_soon in_machine grep -qx hello /srv/plain/file
    expect 1 "a service that was killed" property NRestarts plain
    in_machine systemctl stop tarfs@plain
    configure_unit kept '--restart'
    start kept
    local main server
    main=$(property MainPID kept)
    server=$(in_machine cat "/proc/$main/task/$main/children")
    keep_directory_busy /srv/kept
    in_machine kill -KILL "${server% }"
    expect_soon in_machine bash -c 'journalctl -u tarfs@kept -o cat | grep "INFO a new process serves the mount"'
    expect hello "a service whose server was killed" in_machine cat /srv/kept/file
    expect "$main" "a service whose server was killed" property MainPID kept
    expect "0" "a service whose server was killed" property NRestarts kept
    expect active "a service whose server was killed" property ActiveState kept
    # It is the same mount, with its users in it.
    # shellcheck disable=SC2016 # The inner shell expands these.
    expect /srv/kept "a user of a mount" in_machine bash -c 'cd "/proc/$(cat /run/user.pid)/cwd/" && pwd -P'
    release_directory
    in_machine systemctl stop tarfs@kept
    expect success "a service that was stopped" property Result kept
    if is_mounted /srv/kept; then fail "a restarted service has left its mount"; fi
    # If the main process is killed, systemd restarts the service.
    start kept
    in_machine kill -KILL "$(property MainPID kept)"
    expect_soon is_property NRestarts kept 1
    expect_soon in_machine grep -qx hello /srv/kept/file
    expect 1 "a service whose main process was killed" in_machine grep -c ' /srv/kept ' /proc/mounts
    in_machine systemctl stop tarfs@kept
    echo "a service that is killed is restarted or its mount continued"
}

# A source that is not there is an error, at once.
try_failure() {
    configure_unit broken ''
    in_machine sed -i 's/archive.tar/nowhere.tar/' /etc/tarfs/broken.conf
    if in_machine systemctl start tarfs@broken 2>/dev/null; then fail "a service of nothing was started"; fi
    in_machine systemctl stop tarfs@broken
    if is_mounted /srv/broken; then fail "a service of nothing is mounted"; fi
    echo "a service without a source fails"
}

# With what the unit says that they need, --copy-to and --writable run as well.
try_more_rights() {
    local copy='CAP_DAC_OVERRIDE CAP_CHOWN CAP_FOWNER CAP_FSETID CAP_MKNOD CAP_SETFCAP CAP_MAC_ADMIN'
    configure_unit copy "--copy-to /var/tmp/copy" "CapabilityBoundingSet=$copy
DevicePolicy=auto"
    start copy
    expect_soon in_machine grep -qx hello /var/tmp/copy/file
    in_machine systemctl stop tarfs@copy
    in_machine mkdir -p /var/tmp/upper
    configure_unit writable "--writable --upper /var/tmp/upper" \
        "CapabilityBoundingSet=$copy CAP_LINUX_IMMUTABLE"
    start writable
    in_machine bash -c 'echo changed >/srv/writable/file'
    in_machine systemctl restart tarfs@writable
    expect changed "a writable service" in_machine cat /srv/writable/file
    in_machine systemctl stop tarfs@writable
    echo "a service with --copy-to or --writable has what it needs"
}

# Tests the examples, and a line of fstab that mounts at the first access.
try_mounts() {
    local unit
    in_machine mkdir -p /srv/data /srv/line
    for unit in srv-data.mount srv-data.automount; do
        sed "s|https://example.com/data.tar.zst|$nginx_url/archive.tar|" \
            "/usr/share/doc/tarfs/examples/$unit" | in_machine tee "/run/systemd/system/$unit" >/dev/null
    done
    echo "$nginx_url/archive.tar /srv/line tarfs ro,allow_other,_netdev,nofail,x-systemd.automount 0 0" |
        in_machine tee /etc/fstab >/dev/null
    in_machine systemctl daemon-reload
    in_machine systemctl start srv-data.automount remote-fs.target
    for unit in data line; do
        if is_mounted "/srv/$unit fuse.tarfs"; then fail "/srv/$unit is mounted before the first access"; fi
        expect hello "an automount" in_machine cat "/srv/$unit/file"
        expect active "an automount" in_machine systemctl is-active "srv-$unit.mount"
        in_machine systemctl stop "srv-$unit.automount" "srv-$unit.mount"
        if is_mounted "/srv/$unit"; then fail "/srv/$unit is still mounted"; fi
    done
    echo "an example and a line of fstab mount at the first access"
}

# At shutdown, systemd does not kill processes whose name begins with @, so such a mount does not unmount.
try_shutdown() {
    local name
    for name in tarfs @tarfs; do
        in_machine mkdir "/srv/$name"
        in_machine bash -c "exec -a $name tarfs mount --log-file $work/$name.log $nginx_url/archive.tar /srv/$name"
    done
    machine_stop
    grep -q 'INFO unmounted' "$work/tarfs.log" || fail "a mount was not ended at shutdown"
    if grep -q 'INFO unmounted' "$work/@tarfs.log"; then fail "a mount called @tarfs was ended at shutdown"; fi
    echo "a shutdown ends a mount, and spares one that is called @tarfs"
}

try_units() {
    local step
    for step in service kills failure more_rights mounts shutdown; do "try_$step"; done
}
