# shellcheck shell=bash
# The ways between server and client that are measured, all on 127.0.0.1:
#   plain  nothing in between
#   60MB   60 MB/s for each connection
#   40ms   a round trip takes 40 ms
#   far    both: 60 MB/s for each connection, and a round trip takes 40 ms
#   none   no server: the archive is a file

# shellcheck disable=SC2034 # Some scripts that source this ask for all of them.
readonly networks=(plain 60MB 40ms far none)
readonly limited_rate=60000000
readonly one_way_ms=20

# Serves the directory $1 on every network.
networks_start() {
    nginx_start "$1" "$limited_rate"
    delay_dir=$(mktemp -d)
    delay_pids=()
    delay 40ms "$nginx_url"
    delay far "$nginx_limited_url"
}

# Starts the proxy of network $1 before the server $2.
delay() {
    "$BENCHES/delay" 0 "${2##*:}" "$one_way_ms" >"$delay_dir/$1" &
    delay_pids+=($!)
    until [[ -s $delay_dir/$1 ]]; do
        kill -0 $! 2>/dev/null || fail "the delaying proxy does not start"
        sleep 0.02
    done
}

# Safe to call twice.
networks_stop() {
    nginx_stop
    [[ -n ${delay_dir:-} ]] || return 0
    kill "${delay_pids[@]}" 2>/dev/null || true
    wait "${delay_pids[@]}" || true
    remove_tree "$delay_dir"
    delay_dir=
}

# Where the archive $1 of the directory $3 is found on network $2.
archive_location() {
    case $2 in
    plain) echo "$nginx_url/$1" ;;
    60MB) echo "$nginx_limited_url/$1" ;;
    40ms | far) echo "http://127.0.0.1:$(<"$delay_dir/$2")/$1" ;;
    none) echo "$3/$1" ;;
    esac
}
