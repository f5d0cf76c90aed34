# shellcheck shell=bash
# Facts about this version of the project, for packages. Source lib/common.sh before this.

# The field $1 of the package in Cargo.toml.
of_manifest() { sed -n "s/^$1 = \"\(.*\)\"$/\1/p" "$project/Cargo.toml" | head -n 1; }

of_last_commit() { git -C "$project" log -1 --format="$1"; }

# Sets SOURCE_DATE_EPOCH, the time of all packed files, to that of the last commit.
set_source_date() {
    SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(of_last_commit %ct)}
    export SOURCE_DATE_EPOCH
}
