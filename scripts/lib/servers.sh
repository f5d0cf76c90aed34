# shellcheck shell=bash
# Web servers and proxies in many set-ups, one at a time: private instances with a configuration and a
# directory of their own, on free ports of 127.0.0.1.
#
#   servers_install SETUP...    installs the packages of these set-ups; no service starts
#   server_start SETUP DIR      serves the directory DIR, and sets server_url and server_certificate
#   server_stop                 stops it; safe to call twice
#
# Each set-up is a function setup_NAME, with _ for each - of its name. It writes what the server needs into
# $server_dir and starts it with server_run; $served is the directory that is served, $port a free port, and
# $backend_port another one. A set-up that speaks TLS sets scheme=https.
#
# Whoever sources this has sourced lib/common.sh and lib/apt.sh, is root, and has let everyone read DIR,
# because some servers give up being root.

# Every set-up with the Debian packages that it needs. The first ones are those that once were slow.
readonly server_packages=(
    'nginx nginx-light'
    'apache-single apache2-bin'
    'merecat merecat'
    'varnish-whole varnish nginx-light'
)

# The names of all set-ups.
server_setups() { printf '%s\n' "${server_packages[@]%% *}"; }

# Installs the Debian packages of the set-ups in the arguments.
servers_install() {
    local setup line words packages=(util-linux openssl curl)
    for setup; do
        for line in "${server_packages[@]}"; do
            read -ra words <<<"$line"
            [[ ${words[0]} != "$setup" ]] || packages+=("${words[@]:1}")
        done
    done
    # Another package of nginx serves as well.
    if command -v nginx >/dev/null; then packages=("${packages[@]/#nginx-light/nginx}"); fi
    apt_install_without_services "${packages[@]}"
}

# Serves the directory $2 with set-up $1.
server_start() {
    local setup=$1 served=$2 port backend_port scheme=http attempt
    for ((attempt = 0; attempt < 5; attempt++)); do
        server_dir=$(mktemp -d)
        # Servers that are not root look into it.
        chmod 755 "$server_dir"
        server_pids=()
        port=$((20000 + RANDOM % 5000 * 2))
        backend_port=$((port + 1))
        server_certificate=
        "setup_${setup//-/_}"
        server_url=$scheme://127.0.0.1:$port
        if server_answers; then return; fi
        tail -v -n 20 "$server_dir"/*log >&2 2>/dev/null || true
        say "$setup does not start on port $port"
        server_stop
    done
    fail "$setup does not start; its messages are above"
}

# Starts one process of the server in the background. It and its children end with this script, however
# that ends, because the kernel kills all processes of a PID namespace with its first one.
server_run() {
    setpriv --pdeathsig KILL unshare --pid --fork --kill-child "$@" \
        >>"$server_dir/output.log" 2>&1 </dev/null &
    server_pids+=($!)
}

# Waits until the server answers; fails when one of its processes ends, or after 30 seconds.
server_answers() {
    local tries pid
    for ((tries = 0; tries < 300; tries++)); do
        for pid in "${server_pids[@]}"; do
            kill -0 "$pid" 2>/dev/null || return 1
        done
        # Any answer counts, also that there is nothing at this place.
        if curl -s -o /dev/null --max-time 2 ${server_certificate:+--cacert "$server_certificate"} \
            "$server_url/nothing"; then
            return 0
        fi
        sleep 0.1
    done
    return 1
}

server_stop() {
    [[ -n ${server_dir:-} ]] || return 0
    local pid
    for pid in "${server_pids[@]}"; do
        kill -KILL "$pid" 2>/dev/null || true
        wait "$pid" 2>/dev/null || true
    done
    remove_tree "$server_dir"
    server_dir=
}

# Makes a certificate for 127.0.0.1 and sets scheme; its key is beside it, and both are in both.pem.
use_tls() {
    server_certificate=$server_dir/certificate.pem
    openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=127.0.0.1 \
        -addext subjectAltName=IP:127.0.0.1 -keyout "$server_dir/key.pem" \
        -out "$server_certificate" 2>/dev/null
    cat "$server_certificate" "$server_dir/key.pem" >"$server_dir/both.pem"
    chmod 644 "$server_dir"/*.pem
    scheme=https
}

# nginx

# Starts an nginx on port $1 with the lines $2 in its server, the lines $3 in its http part, and $4 behind
# the port it listens on.
run_nginx() {
    local configuration=$server_dir/nginx.$1.conf
    cat >"$configuration" <<CONFIGURATION
user root root;
worker_processes 2;
daemon off;
pid $server_dir/nginx.$1.pid;
error_log $server_dir/nginx.$1.log;
events { worker_connections 256; }
http {
    default_type application/octet-stream;
    sendfile on;
    tcp_nopush on;
    access_log off;
    client_body_temp_path $server_dir/body.$1;
    proxy_temp_path $server_dir/proxy.$1;
    fastcgi_temp_path $server_dir/fastcgi.$1;
    uwsgi_temp_path $server_dir/uwsgi.$1;
    scgi_temp_path $server_dir/scgi.$1;
    ${3:-}
    server {
        listen 127.0.0.1:$1 ${4:-};
        root $served;
        ${2:-}
    }
}
CONFIGURATION
    server_run nginx -p "$server_dir" -e "$server_dir/nginx.$1.log" -c "$configuration"
}

setup_nginx() { run_nginx "$port"; }

# Apache

# Starts an Apache with the multi-processing module $1, the modules $2 and the lines $3; $4 are arguments.
run_apache() {
    local module
    {
        for module in "mpm_$1" authz_core mime $2; do
            echo "LoadModule ${module}_module /usr/lib/apache2/modules/mod_$module.so"
        done
        cat <<CONFIGURATION
ServerRoot $server_dir
ServerName 127.0.0.1
PidFile $server_dir/apache.pid
ErrorLog $server_dir/apache.log
TypesConfig /dev/null
User www-data
Group www-data
Listen 127.0.0.1:$port
DocumentRoot $served
<Directory />
    Require all granted
</Directory>
$3
CONFIGURATION
    } >"$server_dir/apache.conf"
    # shellcheck disable=SC2086 # Several arguments, or none.
    server_run /usr/sbin/apache2 -f "$server_dir/apache.conf" -D FOREGROUND ${4:-}
}

# One process, which serves one connection at a time and keeps it for five seconds.
setup_apache_single() { run_apache prefork '' 'KeepAliveTimeout 5' -X; }

# merecat: packs each file for each request to find out whether that is worthwhile.
setup_merecat() { server_run merecat -n -s -p "$port" -P "$server_dir/merecat.pid" "$served"; }

# Varnish

# Starts a Varnish before a backend on $backend_port, with $1 in what it does with the backend's answers,
# and $2 in what it does with requests.
run_varnish() {
    cat >"$server_dir/default.vcl" <<CONFIGURATION
vcl 4.1;
backend default { .host = "127.0.0.1"; .port = "$backend_port"; }
sub vcl_recv { ${2:-} }
sub vcl_backend_response { ${1:-} }
CONFIGURATION
    server_run varnishd -F -j none -n "$server_dir/varnish" -a "127.0.0.1:$port" \
        -f "$server_dir/default.vcl" -s malloc,2g
}

# Stores all of a file, packed, before it answers, and unpacks it from its front for each range.
setup_varnish_whole() {
    run_nginx "$backend_port"
    run_varnish 'set beresp.do_stream = false; set beresp.do_gzip = true;'
}
