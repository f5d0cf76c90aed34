# shellcheck shell=bash
# Web servers and proxies in many set-ups, one at a time: private instances with a configuration and a
# directory of their own, on free ports of 127.0.0.1.
#
#   servers_install SETUP...    installs the packages of these set-ups; no service starts
#   server_start SETUP DIR      serves the directory DIR, and sets server_url, and what clients need:
#                               server_flags for curl and tarfs, tarfs_flags for tarfs alone, server_netrc
#   server_stop                 stops it; safe to call twice
#
# Each set-up is a function setup_NAME, with _ for each - of its name. It writes what the server needs into
# $server_dir and starts it with server_run; $served is the directory that is served, $port a free port, and
# $backend_port another one. A set-up that speaks TLS sets scheme=https. A set-up whose second server must be
# used, too, sets used_log to that server's log of requests.
#
# Source lib/common.sh and lib/apt.sh before this, as root, and let all users read DIR,
# because some servers drop root.

# Every set-up with the Debian packages that it needs. The first ones are those that once were slow.
readonly server_packages=(
    'nginx nginx-light'
    'apache-single apache2-bin'
    'merecat merecat'
    'varnish-whole varnish nginx-light'
    'nginx-tls nginx-light'
    'nginx-http2 nginx-light'
    'nginx-no-ranges nginx-light'
    'nginx-no-validators nginx-light'
    'nginx-one-connection nginx-light'
    'nginx-few-requests nginx-light'
    'nginx-slow-connections nginx-light'
    'nginx-proxy nginx-light'
    'nginx-cache nginx-light'
    'nginx-password nginx-light'
    'nginx-client-certificate nginx-light'
    'apache-prefork apache2-bin'
    'apache-event apache2-bin'
    'apache-http2 apache2-bin'
    'apache-cache apache2-bin'
    'lighttpd lighttpd'
    'caddy caddy'
    'caddy-http2 caddy'
    'varnish varnish nginx-light'
    'varnish-pass varnish nginx-light'
    'squid squid nginx-light'
    'haproxy haproxy nginx-light'
    'haproxy-one-connection haproxy nginx-light'
    'hitch hitch nginx-light'
    'stunnel stunnel4 nginx-light'
    'nghttpx nghttp2-proxy nginx-light'
    'webfs webfs'
    'mini-httpd mini-httpd'
    'civetweb civetweb'
    'busybox busybox-static'
    'python python3'
    'aiohttp python3-aiohttp'
    'flask python3-flask'
    'tornado python3-tornado'
    'twisted python3-twisted'
    'starlette python3-starlette python3-uvicorn'
    'cherrypy python3-cherrypy3'
    'rclone rclone'
    'webrick ruby ruby-webrick'
    'php php-cli'
)

# Set-ups that only tarfs can read as a whole, because curl has no mirrors and no such proxies.
readonly tarfs_packages=(
    'nginx-slow-mirror nginx-light'
    'nginx-dying-mirror nginx-light'
    'nginx-slice-cache nginx-light'
    'nginx-secure-link nginx-light'
    'nginx-uploads nginx-light'
)

# The names of the set-ups that curl can read, and of those that only tarfs can read.
server_setups() { printf '%s\n' "${server_packages[@]%% *}"; }
tarfs_setups() { printf '%s\n' "${tarfs_packages[@]%% *}"; }

# Installs the Debian packages of the set-ups in the arguments.
servers_install() {
    local setup line words packages=(util-linux openssl curl)
    for setup; do
        for line in "${server_packages[@]}" "${tarfs_packages[@]}"; do
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
    for ((attempt = 0; attempt < 3; attempt++)); do
        server_dir=$(mktemp -d)
        # Servers that are not root look into it.
        chmod 755 "$server_dir"
        server_pids=()
        port=$((20000 + RANDOM % 5000 * 2))
        backend_port=$((port + 1))
        server_flags=()
        tarfs_flags=()
        server_netrc=
        used_log=
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
# that ends, because the kernel kills all processes of a PID namespace with its first one. That is a shell,
# because a server that drops root would no longer be notified of its parent's end.
server_run() {
    # shellcheck disable=SC2016 # The shell in the namespace expands it.
    setpriv --pdeathsig KILL unshare --pid --fork --kill-child sh -c '"$@"; exit' sh "$@" \
        >>"$server_dir/output.log" 2>&1 </dev/null &
    server_pids+=($!)
}

# Waits until the server answers; fails when one of its processes ends, or after 15 seconds.
server_answers() {
    local tries pid
    for ((tries = 0; tries < 150; tries++)); do
        for pid in "${server_pids[@]}"; do
            kill -0 "$pid" 2>/dev/null || return 1
        done
        # Any answer counts, also that there is nothing at this place.
        if curl -s -o /dev/null --max-time 2 "${server_flags[@]}" "$server_url/nothing"; then
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
    local certificate=$server_dir/certificate.pem
    openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=127.0.0.1 \
        -addext subjectAltName=IP:127.0.0.1 -keyout "$server_dir/key.pem" \
        -out "$certificate" 2>/dev/null
    cat "$certificate" "$server_dir/key.pem" >"$server_dir/both.pem"
    chmod 644 "$server_dir"/*.pem
    server_flags=(--cacert "$certificate")
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

setup_nginx_tls() {
    use_tls
    run_nginx "$port" "$(nginx_certificate)" '' ssl
}

setup_nginx_http2() {
    use_tls
    run_nginx "$port" "$(nginx_certificate)" '' 'ssl http2'
}

nginx_certificate() {
    echo "ssl_certificate $server_dir/certificate.pem; ssl_certificate_key $server_dir/key.pem;"
}

setup_nginx_no_ranges() { run_nginx "$port" 'max_ranges 0;'; }

setup_nginx_no_validators() {
    # Without a date of the file the header has no value, and is not sent.
    run_nginx "$port" 'etag off; if_modified_since off; location / { add_header Last-Modified ""; }'
}

# Refuses (503) each connection but one.
setup_nginx_one_connection() {
    # shellcheck disable=SC2016 # The dollar is nginx'.
    run_nginx "$port" 'limit_conn all 1;' 'limit_conn_zone $server_port zone=all:1m;'
}

# Refuses (503) more than 20 requests a second, and more than 5 at once.
setup_nginx_few_requests() {
    # shellcheck disable=SC2016 # The dollar is nginx'.
    run_nginx "$port" 'limit_req zone=all burst=5 nodelay;' \
        'limit_req_zone $server_port zone=all:1m rate=20r/s;'
}

# 60 MB/s for each connection.
setup_nginx_slow_connections() { run_nginx "$port" 'limit_rate 60000000; sendfile_max_chunk 240k;'; }

# Each request of the proxy is another connection to the server.
setup_nginx_proxy() {
    run_nginx "$backend_port"
    run_nginx "$port" "location / { proxy_pass http://127.0.0.1:$backend_port; }"
}

# Stores a file whole, and answers ranges of what is stored.
setup_nginx_cache() {
    run_nginx "$backend_port"
    run_nginx "$port" "location / { proxy_pass http://127.0.0.1:$backend_port; proxy_cache all;
            proxy_cache_valid 200 1h; proxy_cache_lock on; }" \
        "proxy_cache_path $server_dir/cache keys_zone=all:1m;"
}

# Serves only a user whose password is in a netrc file.
setup_nginx_password() {
    echo "reader:$(openssl passwd -apr1 'a "b')" >"$server_dir/passwords"
    server_netrc=$server_dir/netrc
    echo 'machine 127.0.0.1 login reader password "a \"b"' >"$server_netrc"
    run_nginx "$port" "auth_basic all; auth_basic_user_file $server_dir/passwords;"
}

# Serves only a client whose certificate its authority has signed.
setup_nginx_client_certificate() {
    use_tls
    local authority=$server_dir/authority client=$server_dir/client
    openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=authority -keyout "$authority.key" \
        -out "$authority.pem" 2>/dev/null
    openssl req -newkey rsa:2048 -nodes -subj /CN=client -keyout "$client.key" -out "$client.csr" \
        2>/dev/null
    openssl x509 -req -days 2 -in "$client.csr" -CA "$authority.pem" -CAkey "$authority.key" \
        -CAcreateserial -out "$client.pem" 2>/dev/null
    server_flags+=(--cert "$client.pem" --key "$client.key")
    run_nginx "$port" "$(nginx_certificate) ssl_client_certificate $authority.pem;
        ssl_verify_client on;" '' ssl
}

# A mirror ten times as fast.
setup_nginx_slow_mirror() {
    run_nginx "$port" 'limit_rate 3000000; sendfile_max_chunk 16k;'
    use_second_server 'limit_rate 30000000; sendfile_max_chunk 128k;'
    tarfs_flags=(--mirror-url "http://127.0.0.1:$backend_port/archive.tar")
}

# A mirror as fast. The first server ends at its eighth request.
setup_nginx_dying_mirror() {
    local log=$server_dir/first.log first
    run_nginx "$port" "access_log $log; limit_rate 10000000; sendfile_max_chunk 64k;"
    first=${server_pids[0]}
    use_second_server 'limit_rate 10000000; sendfile_max_chunk 64k;'
    tarfs_flags=(--mirror-url "http://127.0.0.1:$backend_port/archive.tar")
    (
        until [[ -e $log && $(wc -l <"$log") -ge 8 ]]; do sleep 0.02; done
        kill -KILL "$first"
    ) &
    server_pids+=($!)
}

# A proxy beside the server, which stores slices of files.
setup_nginx_slice_cache() {
    run_nginx "$port"
    # shellcheck disable=SC2016 # The dollars are nginx'.
    use_second_server 'location ~ "^/(https?)/([^/]+)(/.*)$" {
            slice 1m; proxy_cache all; proxy_cache_key $uri$is_args$args$slice_range;
            proxy_set_header Range $slice_range; proxy_cache_valid 200 206 1h; proxy_cache_lock on;
            proxy_http_version 1.1; proxy_pass $1://$2$3$is_args$args; }' \
        "proxy_cache_path $server_dir/cache keys_zone=all:1m;"
    # shellcheck disable=SC2034 # The scripts that source this read it.
    tarfs_flags=(--via "http://127.0.0.1:$backend_port")
}

# Serves only clients with a signature that has neither expired nor been revoked, in headers of a file.
setup_nginx_secure_link() {
    run_nginx "$port" "secure_link \$http_x_signature,\$http_x_expires;
        secure_link_md5 \"\$http_x_expires\$uri tests\";
        if (\$secure_link != 1) { return 403; }
        if (-f $server_dir/revoked.\$http_x_expires) { return 403; }"
    server_link=$server_dir/link
    sign_link 600
    tarfs_flags=(--header "@$server_link")
}

# Takes uploads, of clients with a token.
setup_nginx_uploads() {
    # shellcheck disable=SC2016 # The dollar is nginx'.
    run_nginx "$port" 'dav_methods PUT; client_max_body_size 1g;
        if ($http_authorization != "Bearer token0123456789") { return 403; }'
    echo 'Authorization: Bearer token0123456789' >"$server_dir/token"
    # shellcheck disable=SC2034 # The scripts that source this read it.
    tarfs_flags=(--header "@$server_dir/token")
}

# Revokes the signature in server_link, and replaces it by another one.
renew_link() {
    touch "$server_dir/revoked.$server_link_expires"
    sign_link 1200
}

# Writes headers for the archive into server_link that expire in $1 seconds.
sign_link() {
    local expires signature
    expires=$(($(date +%s) + $1))
    server_link_expires=$expires
    signature=$(printf '%s/archive.tar tests' "$expires" | openssl md5 -binary | base64 | tr '+/' '-_' | tr -d '=')
    printf 'X-Signature: %s\nX-Expires: %s\n' "$signature" "$expires" >"$server_link.new"
    mv "$server_link.new" "$server_link"
}

# Starts an nginx on $backend_port that must be used, with the lines $1 in its server and $2 in its http part.
use_second_server() {
    used_log=$server_dir/used.log
    run_nginx "$backend_port" "access_log $used_log; $1" "${2:-}"
}

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

setup_apache_prefork() { run_apache prefork '' ''; }

setup_apache_event() { run_apache event '' ''; }

setup_apache_http2() {
    use_tls
    run_apache event 'ssl http2 socache_shmcb' "Protocols h2 http/1.1
SSLEngine on
SSLCertificateFile $server_dir/certificate.pem
SSLCertificateKeyFile $server_dir/key.pem"
}

# Keeps what it serves in a cache on disk.
setup_apache_cache() {
    mkdir "$server_dir/cache"
    chown www-data "$server_dir/cache"
    run_apache event 'cache cache_disk' "CacheEnable disk /
CacheRoot $server_dir/cache
CacheMaxFileSize 10000000000
CacheDefaultExpire 3600
CacheQuickHandler on"
}

# lighttpd

setup_lighttpd() {
    cat >"$server_dir/lighttpd.conf" <<CONFIGURATION
server.document-root = "$served"
server.bind = "127.0.0.1"
server.port = $port
server.errorlog = "$server_dir/lighttpd.log"
CONFIGURATION
    server_run lighttpd -D -f "$server_dir/lighttpd.conf"
}

# Caddy

run_caddy() {
    cat >"$server_dir/Caddyfile" <<CONFIGURATION
{
    admin off
    auto_https disable_redirects
    storage file_system $server_dir/storage
}
$scheme://127.0.0.1:$port {
    ${1:-}
    root * $served
    file_server
}
CONFIGURATION
    HOME=$server_dir server_run caddy run --adapter caddyfile --config "$server_dir/Caddyfile"
}

setup_caddy() { run_caddy; }

setup_caddy_http2() {
    use_tls
    run_caddy "tls $server_dir/certificate.pem $server_dir/key.pem"
}

# merecat: reads each file for each request to make its ETag, one after the other.
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

setup_varnish() {
    run_nginx "$backend_port"
    run_varnish
}

# Stores nothing: the backend answers each range.
setup_varnish_pass() {
    run_nginx "$backend_port"
    run_varnish '' 'return (pass);'
}

# Other proxies

setup_squid() {
    run_nginx "$backend_port"
    mkdir "$server_dir/squid"
    chown proxy "$server_dir/squid"
    cat >"$server_dir/squid.conf" <<CONFIGURATION
http_port 127.0.0.1:$port accel defaultsite=127.0.0.1 no-vhost
cache_peer 127.0.0.1 parent $backend_port 0 no-query originserver
http_access allow all
cache_mem 1 GB
maximum_object_size 1 GB
maximum_object_size_in_memory 1 GB
range_offset_limit none
pid_filename $server_dir/squid/pid
cache_log $server_dir/squid/cache.log
access_log none
coredump_dir $server_dir/squid
pinger_enable off
shutdown_lifetime 1 second
visible_hostname localhost
CONFIGURATION
    server_run squid --foreground -n "tarfs$port" -f "$server_dir/squid.conf"
}

# haproxy, with $1 on the line of its backend.
run_haproxy() {
    run_nginx "$backend_port"
    cat >"$server_dir/haproxy.cfg" <<CONFIGURATION
defaults
    mode http
    timeout connect 5s
    timeout client 60s
    timeout server 60s
    timeout queue 60s
listen all
    bind 127.0.0.1:$port
    server backend 127.0.0.1:$backend_port ${1:-}
CONFIGURATION
    server_run haproxy -db -f "$server_dir/haproxy.cfg"
}

setup_haproxy() { run_haproxy; }

# Sends one request at once to the backend, and lets the others wait.
setup_haproxy_one_connection() { run_haproxy 'maxconn 1'; }

setup_hitch() {
    run_nginx "$backend_port"
    use_tls
    server_run hitch --user=www-data --frontend="[127.0.0.1]:$port" \
        --backend="[127.0.0.1]:$backend_port" --daemon=off --workers=2 "$server_dir/both.pem"
}

setup_stunnel() {
    run_nginx "$backend_port"
    use_tls
    cat >"$server_dir/stunnel.conf" <<CONFIGURATION
foreground = yes
pid =
[all]
accept = 127.0.0.1:$port
connect = 127.0.0.1:$backend_port
cert = $server_dir/both.pem
CONFIGURATION
    server_run stunnel4 "$server_dir/stunnel.conf"
}

setup_nghttpx() {
    run_nginx "$backend_port"
    use_tls
    server_run nghttpx --conf=/dev/null --user=root --frontend="127.0.0.1,$port" \
        --backend="127.0.0.1,$backend_port" --workers=2 \
        "$server_dir/key.pem" "$server_dir/certificate.pem"
}

# Small servers

setup_webfs() { server_run webfsd -F -4 -i 127.0.0.1 -p "$port" -r "$served"; }

setup_mini_httpd() {
    server_run mini_httpd -D -h 127.0.0.1 -p "$port" -d "$served" -u root -i "$server_dir/mini.pid"
}

setup_civetweb() {
    server_run civetweb -listening_ports "127.0.0.1:$port" -document_root "$served"
}

setup_busybox() { server_run busybox httpd -f -p "127.0.0.1:$port" -h "$served"; }

# Python

setup_python() { server_run python3 -m http.server --bind 127.0.0.1 --directory "$served" "$port"; }

# Starts the Python program on stdin with the port and the served directory as its arguments.
run_python() {
    cat >"$server_dir/server.py"
    # Debian's packages are for Debian's Python.
    server_run /usr/bin/python3 "$server_dir/server.py" "$port" "$served"
}

setup_aiohttp() {
    run_python <<'PROGRAM'
import sys
from aiohttp import web
app = web.Application()
app.router.add_static("/", sys.argv[2])
web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]), print=None)
PROGRAM
}

setup_flask() {
    run_python <<'PROGRAM'
import sys
from flask import Flask
app = Flask("server", static_folder=sys.argv[2], static_url_path="")
app.run(host="127.0.0.1", port=int(sys.argv[1]), threaded=True)
PROGRAM
}

setup_tornado() {
    run_python <<'PROGRAM'
import asyncio, sys
from tornado.web import Application, StaticFileHandler
async def main():
    app = Application([("/(.*)", StaticFileHandler, {"path": sys.argv[2]})])
    app.listen(int(sys.argv[1]), "127.0.0.1")
    await asyncio.Event().wait()
asyncio.run(main())
PROGRAM
}

setup_twisted() {
    run_python <<'PROGRAM'
import sys
from twisted.internet import reactor
from twisted.web.server import Site
from twisted.web.static import File
reactor.listenTCP(int(sys.argv[1]), Site(File(sys.argv[2])), interface="127.0.0.1")
reactor.run()
PROGRAM
}

setup_starlette() {
    run_python <<'PROGRAM'
import sys, uvicorn
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.staticfiles import StaticFiles
app = Starlette(routes=[Mount("/", StaticFiles(directory=sys.argv[2]))])
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]))
PROGRAM
}

setup_cherrypy() {
    run_python <<'PROGRAM'
import sys, cherrypy
cherrypy.config.update({"server.socket_host": "127.0.0.1", "server.socket_port": int(sys.argv[1]),
                        "engine.autoreload.on": False})
cherrypy.quickstart(None, "/", {"/": {"tools.staticdir.on": True, "tools.staticdir.dir": sys.argv[2]}})
PROGRAM
}

# Other languages

setup_rclone() {
    server_run rclone --config /dev/null serve http --addr "127.0.0.1:$port" --read-only "$served"
}

setup_webrick() {
    server_run /usr/bin/ruby -rwebrick -e '
        WEBrick::HTTPServer.new(BindAddress: "127.0.0.1", Port: ARGV[0].to_i, DocumentRoot: ARGV[1]).start' \
        "$port" "$served"
}

# One request at a time, without ranges.
setup_php() { server_run php -S "127.0.0.1:$port" -t "$served"; }
