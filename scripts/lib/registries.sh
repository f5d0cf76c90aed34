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

# Stores the manifest on standard input as the tag $2 of the repository $1 of registry_host, and prints its digest.
registry_push_manifest() {
    local manifest
    manifest=$(cat)
    curl -fsS -o /dev/null -X PUT -H 'Content-Type: application/vnd.oci.image.manifest.v1+json' \
        --data-binary "$manifest" "http://$registry_host/v2/$1/manifests/$2"
    echo "sha256:$(printf %s "$manifest" | sha256sum | cut -d' ' -f1)"
}

# Prints a descriptor with the media type $1 of the blob $2 with the content of the file $3. $4 is more of its JSON.
registry_descriptor() {
    printf '{"mediaType":"%s","digest":"%s","size":%s%s}' "$1" "$2" "$(stat -c %s "$3")" "${4:-}"
}

# Makes an artifact of the file $3, as the tag $2 of the repository $1 of registry_host.
registry_push_artifact() {
    local config layer
    printf '{}' >"$3.config"
    config=$(registry_push_blob "$1" "$3.config")
    layer=$(registry_push_blob "$1" "$3")
    config=$(registry_descriptor application/vnd.oci.empty.v1+json "$config" "$3.config")
    layer=$(registry_descriptor application/x-tests "$layer" "$3")
    registry_push_manifest "$1" "$2" >/dev/null <<<'{"schemaVersion":2,
        "mediaType":"application/vnd.oci.image.manifest.v1+json","artifactType":"application/x-tests",
        "config":'"$config"',"layers":['"$layer"']}'
}

# Makes an image of the gzipped layer $3, as the tag $2 of the repository $1 of registry_host, and prints the digest of
# its manifest. $4 and $5 are annotations of the manifest and of the layer, in JSON.
registry_push_layer() {
    local plain config layer
    plain=$(zcat "$3" | sha256sum | cut -d' ' -f1)
    printf '{"architecture":"%s","os":"linux","rootfs":{"type":"layers","diff_ids":["sha256:%s"]}}' \
        "$(dpkg --print-architecture)" "$plain" >"$3.config"
    config=$(registry_push_blob "$1" "$3.config")
    layer=$(registry_push_blob "$1" "$3")
    config=$(registry_descriptor application/vnd.oci.image.config.v1+json "$config" "$3.config")
    layer=$(registry_descriptor application/vnd.oci.image.layer.v1.tar+gzip "$layer" "$3" ',"annotations":{'"${5:-}"'}')
    registry_push_manifest "$1" "$2" <<<'{"schemaVersion":2,
        "mediaType":"application/vnd.oci.image.manifest.v1+json","config":'"$config"',
        "layers":['"$layer"'],"annotations":{'"${4:-}"'}}'
}

# Stores the SOCI index, of the version $3, with the ztoc $5 of the layer $4, in the repository $1 of registry_host.
# Prints its digest. With version 1 it refers to the manifest $2, by the tag for that, as soci stores it.
registry_push_soci_index() {
    local config ztoc index size accept type=application/vnd.amazon.soci.index.v$3+json
    printf '{}' >"$5.config"
    config=$(registry_push_blob "$1" "$5.config")
    ztoc=$(registry_push_blob "$1" "$5")
    config=$(registry_descriptor "$type" "$config" "$5.config")
    ztoc=$(registry_descriptor application/octet-stream "$ztoc" "$5" \
        ',"annotations":{"com.amazon.soci.image-layer-digest":"sha256:'"$(sha256sum "$4" | cut -d' ' -f1)"'"}')
    index=$(registry_push_manifest "$1" "soci-$3" <<<'{"schemaVersion":2,
        "mediaType":"application/vnd.oci.image.manifest.v1+json","config":'"$config"',"layers":['"$ztoc"']}')
    if [[ $3 == 1 ]]; then
        accept='Accept: application/vnd.oci.image.manifest.v1+json'
        size=$(curl -fsS -H "$accept" "http://$registry_host/v2/$1/manifests/$index" | wc -c)
        curl -fsS -o /dev/null -X PUT -H 'Content-Type: application/vnd.oci.image.index.v1+json' \
            --data '{"schemaVersion":2,"mediaType":"application/vnd.oci.image.index.v1+json","manifests":[{
            "mediaType":"application/vnd.oci.image.manifest.v1+json","artifactType":"'"$type"'","digest":"'"$index"'",
            "size":'"$size"'}]}' \
            "http://$registry_host/v2/$1/manifests/sha256-${2#sha256:}"
    fi
    echo "$index"
}
