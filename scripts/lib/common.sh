# shellcheck shell=bash
# Functions shared by all scripts; sourced, never run.

export LC_ALL=C
export DEBIAN_FRONTEND=noninteractive
# Debian keeps nginx and debootstrap out of an ordinary user's path, rustup cargo out of root's.
export PATH="$PATH:/usr/sbin:/sbin:$HOME/.cargo/bin"

# The top of the working tree; scripts leave the current directory alone, as arguments are
# relative to it.
project=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
export project

say() { printf '%s\n' "$*" >&2; }

fail() {
    say "${0##*/}: $*"
    exit 1
}

as_root() {
    if [[ $EUID -eq 0 ]]; then
        "$@"
    elif command -v sudo >/dev/null; then
        sudo "$@"
    else
        fail "this needs root, and there is no sudo: run as root \"$*\", then start this script again"
    fi
}

# Starts the calling script again as root, keeping which programs it shall use.
become_root() {
    [[ $EUID -eq 0 ]] || command -v sudo >/dev/null ||
        fail "this needs root, and there is no sudo: start it as root"
    [[ $EUID -eq 0 ]] || exec sudo env TARFS="${TARFS:-}" BENCHES="${BENCHES:-}" \
        TMPDIR="${TMPDIR:-/tmp}" PATH="$PATH" "$0" "$@"
}

# Seconds and hundredths since the time $1, a value of EPOCHREALTIME.
seconds_since() {
    local micros=$((${EPOCHREALTIME/./} - ${1/./}))
    printf '%d.%02d' $((micros / 1000000)) $((micros / 10000 % 100))
}

# Says before the long step $1 how long it takes: $2, on two processors.
announce() { say "$1 (takes about $2)"; }

# Runs a command and says on stderr, under the name $1, how long it took.
timed() {
    local name=$1 start=$EPOCHREALTIME
    shift
    "$@"
    say "$name: $(seconds_since "$start") s"
}

mib() { echo $(($1 / 1048576)); }

# Deletes a directory that may still hold a mount: whatever is mounted there stays untouched.
remove_tree() { rm -rf --one-file-system -- "$@"; }
