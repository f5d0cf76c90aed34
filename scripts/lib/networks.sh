# shellcheck shell=bash
# The ways between server and client that are measured, all on 127.0.0.1:
#   plain  nothing in between
#   60MB   60 MB/s for each connection
#   40ms   a round trip takes 40 ms
#   none   no server: the archive is a file

readonly networks=(plain 60MB 40ms none)
readonly limited_rate=60000000
readonly one_way_ms=20

# Serves the directory $1 on every network.
networks_start() {
    nginx_start "$1" "$limited_rate"
    delay_dir=$(mktemp -d)
    "$BENCHES/delay" 0 "${nginx_url##*:}" "$one_way_ms" >"$delay_dir/port" &
    delay_pid=$!
    until [[ -s $delay_dir/port ]]; do
        kill -0 "$delay_pid" 2>/dev/null || fail "the delaying proxy does not start"
        sleep 0.02
    done
}

# Safe to call twice.
networks_stop() {
    nginx_stop
    [[ -n ${delay_dir:-} ]] || return 0
    kill "$delay_pid" 2>/dev/null || true
    wait "$delay_pid" || true
    remove_tree "$delay_dir"
    delay_dir=
}

# Where the archive $1 of the directory $3 is found on network $2.
place_of() {
    case $2 in
    plain) echo "$nginx_url/$1" ;;
    60MB) echo "$nginx_limited_url/$1" ;;
    40ms) echo "http://127.0.0.1:$(<"$delay_dir/port")/$1" ;;
    none) echo "$3/$1" ;;
    esac
}
