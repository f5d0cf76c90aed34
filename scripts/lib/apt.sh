# shellcheck shell=bash
# Debian packages: installs those that are missing, and only those.

is_installed() {
    [[ $(dpkg-query -W -f '${db:Status-Status}' "$1" 2>/dev/null) == installed ]]
}

# Call this before downloads, because old lists name packages that no longer exist.
apt_update() {
    apt_get update -qq
}

# One at a time, because scripts run at the same time. The lock is on a directory that every Debian has, also in
# a container without /run/lock. dpkg's own locks are on files in it.
apt_get() {
    as_root env DEBIAN_FRONTEND=noninteractive flock /var/lib/dpkg apt-get "$@" </dev/null >&2
}

apt_install() {
    local package missing=()
    for package; do
        is_installed "$package" || missing+=("$package")
    done
    [[ ${#missing[@]} -gt 0 ]] || return 0
    announce "installing ${missing[*]}" "a minute"
    apt_update
    apt_get install -y -qq --no-install-recommends "${missing[@]}"
}

# The same, and no service of these packages starts: the packages' scripts ask policy-rc.d.
apt_install_without_services() {
    local policy=/usr/sbin/policy-rc.d
    if [[ -e $policy ]]; then
        apt_install "$@"
        return
    fi
    # In a process of its own, which removes the file however it ends.
    (
        trap 'as_root rm -f "$policy"' EXIT
        trap 'exit 130' INT
        trap 'exit 143' TERM
        printf '#!/bin/sh\nexit 101\n' | as_root install -m 755 /dev/stdin "$policy"
        apt_install "$@"
    ) || fail "installation failed: $*"
}

# The package starts a server on port 80, which we do not need. A fresh one is stopped again.
apt_install_nginx() {
    if command -v nginx >/dev/null; then return; fi
    apt_install nginx-light
    as_root systemctl disable --now nginx >/dev/null 2>&1 ||
        as_root service nginx stop >/dev/null 2>&1 || true
}

# Prints the base address of the mirror that the system's own configuration has for the suite $1.
apt_mirror() {
    # shellcheck disable=SC2016 # The dollars are apt's.
    apt-get indextargets --format '$(CODENAME) $(COMPONENT) $(REPO_URI)' 'Created-By: Packages' |
        awk -v suite="$1" '$1 == suite && $2 == "main" && !found { print $3; found = 1 }'
}
