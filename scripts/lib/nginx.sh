# shellcheck shell=bash
# shellcheck disable=SC2034 # The URLs are for the scripts that source this.
# A private nginx on a free port of 127.0.0.1: own configuration, own temporary directory.

# Serves the directory $1 and sets nginx_url; given a rate in bytes a second, also serves it at this
# rate a connection and sets nginx_limited_url. One server a script.
nginx_start() {
    local served=$1 rate=${2:-} attempt port
    nginx_dir=$(mktemp -d)
    for ((attempt = 0; attempt < 20; attempt++)); do
        port=$((20000 + RANDOM % 12000))
        nginx_configuration "$served" "$port" "$rate" >"$nginx_dir/nginx.conf"
        # -e: without it nginx first tries the log under /var, which only root may write.
        if nginx -p "$nginx_dir" -e "$nginx_dir/error.log" -c "$nginx_dir/nginx.conf" 2>/dev/null; then
            nginx_url=http://127.0.0.1:$port
            nginx_limited_url=http://127.0.0.1:$((port + 1))
            return
        fi
    done
    cat "$nginx_dir/error.log" >&2
    fail "nginx does not start; its messages are above"
}

nginx_configuration() {
    # As root, the workers would run as an unprivileged user, which may not read a private directory.
    [[ $EUID -ne 0 ]] || echo 'user root root;'
    cat <<CONFIGURATION
worker_processes 2;
pid $nginx_dir/pid;
events { worker_connections 256; }
http {
    default_type application/octet-stream;
    sendfile on;
    tcp_nopush on;
    access_log off;
    client_body_temp_path $nginx_dir/body;
    proxy_temp_path $nginx_dir/proxy;
    fastcgi_temp_path $nginx_dir/fastcgi;
    uwsgi_temp_path $nginx_dir/uwsgi;
    scgi_temp_path $nginx_dir/scgi;
    $(nginx_server "$1" "$2")
    $([[ -z $3 ]] || nginx_server "$1" $(($2 + 1)) "$3")
}
CONFIGURATION
}

# The rate holds between two writes to a socket: what is answered in one write would know no limit,
# so writes are kept short.
nginx_server() {
    echo "server { listen 127.0.0.1:$2; root $1;"
    [[ -z ${3:-} ]] || echo "limit_rate $3; sendfile_max_chunk 240k;"
    echo '}'
}

# Stops the server if one runs; safe to call twice.
nginx_stop() {
    [[ -n ${nginx_dir:-} ]] || return 0
    local pid
    if pid=$(cat "$nginx_dir/pid" 2>/dev/null); then
        kill "$pid" 2>/dev/null || true
        while kill -0 "$pid" 2>/dev/null; do sleep 0.05; done
    fi
    remove_tree "$nginx_dir"
    nginx_dir=
}
