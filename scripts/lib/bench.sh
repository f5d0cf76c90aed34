# shellcheck shell=bash
# Measuring: time, processor time and peak memory of a command, medians of rounds.

# Runs the shell line $2 and writes "seconds, processor seconds, peak KiB" to the file $1. In a
# pipeline the peak is that of its largest process.
measure() {
    local result=$1 line=$2
    /usr/bin/time -f '%e %U %S %M' -o "$result.raw" bash -o pipefail -c "$line" || {
        cat "$result.raw" >&2
        fail "failed: $line"
    }
    awk '{ printf "%.2f %.2f %d\n", $1, $2 + $3, $4 }' "$result.raw" >"$result"
    rm "$result.raw"
}

# The median of the numbers on stdin, one a line; the lower middle of an even count.
median() { sort -n | awk '{ value[NR] = $1 } END { print value[int((NR + 1) / 2)] }'; }

# The largest amount of memory, in KiB, that process $1 has held.
peak_kib() { awk '/^VmHWM:/ { print $2 }' "/proc/$1/status"; }

# Describes the machine in one line, for the tables.
machine() {
    printf '%s x %s, %d GiB, Linux %s\n' "$(nproc)" \
        "$(awk -F': ' '/^model name/ { print $2; exit }' /proc/cpuinfo)" \
        "$(awk '/^MemTotal/ { print int($2 / 1048576 + 0.5) }' /proc/meminfo)" "$(uname -r)"
}
