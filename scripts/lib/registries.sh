# shellcheck shell=bash
# shellcheck disable=SC2034 # The variables are for the scripts that source this.
# Private container registries on 127.0.0.1: Debian's docker-registry, open, with passwords, or with tokens of
# a server that scripts/lib/token-server is.

registry_pids=()

# Starts a registry with its files in the directory $1, and the lines of its authorization on standard input.
# Sets registry_host.
registry_start() {
    local directory=$1 attempt port auth
    auth=$(cat)
    mkdir -p "$directory/blobs"
    for ((attempt = 0; attempt < 20; attempt++)); do
        port=$((20000 + RANDOM % 12000))
        {
            printf 'version: 0.1\nlog:\n  level: error\n'
            printf 'storage:\n  filesystem:\n    rootdirectory: %s\n' "$directory/blobs"
            printf 'http:\n  addr: 127.0.0.1:%s\n  secret: %s\n%s\n' "$port" "$RANDOM" "$auth"
        } >"$directory/config.yml"
        docker-registry serve "$directory/config.yml" >"$directory/log" 2>&1 &
        registry_pids+=($!)
        registry_host=127.0.0.1:$port
        if wait_for_port "$port" $!; then return; fi
    done
    cat "$directory/log" >&2
    fail "docker-registry does not start; its messages are above"
}

# A registry that asks for the passwords in the file $2.
registry_start_with_passwords() {
    registry_start "$1" <<<"auth: { htpasswd: { realm: tests, path: $2 } }"
}

# A registry that asks for tokens, which a server gives for the logins in the file $2, one a line. Tokens are
# valid for $3 seconds, and tell the client that they are valid for longer.
registry_start_with_tokens() {
    local directory=$1 port attempt
    mkdir -p "$directory"
    openssl req -x509 -newkey rsa:2048 -nodes -subj /CN=tokens -days 2 \
        -keyout "$directory/key.pem" -out "$directory/certificate.pem" 2>/dev/null
    for ((attempt = 0; attempt < 20; attempt++)); do
        port=$((20000 + RANDOM % 12000))
        python3 "$project/scripts/lib/token-server" "$port" "$directory" "$2" "$3" 2>"$directory/tokens.log" &
        registry_pids+=($!)
        if wait_for_port "$port" $!; then break; fi
    done
    registry_start "$directory" <<<"auth:
  token:
    realm: http://127.0.0.1:$port/token
    service: tests
    issuer: tests
    rootcertbundle: $directory/certificate.pem"
}

# Prints a line of a file of passwords, for the user $1 with the password $2. Perl is in every Debian.
registry_password() {
    # shellcheck disable=SC2016 # The dollars are those of crypt(5), and Perl's.
    perl -e 'print "$ARGV[0]:", crypt($ARGV[1], q($2y$05$abcdefghijklmnopqrstuu)), "\n"' "$1" "$2"
}

registries_stop() {
    local pid
    for pid in "${registry_pids[@]}"; do
        kill "$pid" 2>/dev/null || true
        wait "$pid" 2>/dev/null || true
    done
    registry_pids=()
}

# Stores the file $2 as a blob of the repository $1 of registry_host, and prints its digest.
registry_push_blob() {
    local url=http://$registry_host/v2/$1/blobs/uploads/ digest location
    digest=sha256:$(sha256sum "$2" | cut -d' ' -f1)
    location=$(curl -fsS -o /dev/null -w '%header{location}' -X POST "$url")
    [[ $location == *\?* ]] && location+="&" || location+="?"
    curl -fsS -o /dev/null -X PUT -H 'Content-Type: application/octet-stream' --data-binary "@$2" \
        "${location}digest=$digest"
    echo "$digest"
}

# Makes an artifact of the file $3, as the tag $2 of the repository $1 of registry_host.
registry_push_artifact() {
    local config layer manifest size
    printf '{}' >"$3.config"
    config=$(registry_push_blob "$1" "$3.config")
    layer=$(registry_push_blob "$1" "$3")
    size=$(stat -c %s "$3")
    manifest='{"schemaVersion":2,"mediaType":"application/vnd.oci.image.manifest.v1+json",'
    manifest+='"artifactType":"application/x-tests",'
    manifest+='"config":{"mediaType":"application/vnd.oci.empty.v1+json","digest":"'$config'","size":2},'
    manifest+='"layers":[{"mediaType":"application/x-tests","digest":"'$layer'","size":'$size'}]}'
    curl -fsS -o /dev/null -X PUT -H 'Content-Type: application/vnd.oci.image.manifest.v1+json' \
        --data "$manifest" "http://$registry_host/v2/$1/manifests/$2"
}
