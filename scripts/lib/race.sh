# shellcheck shell=bash
# Benchmarks in which contenders take turns: their arguments, the list of contenders, and the report.
#
# Source lib/contenders.sh or lib/mounters.sh, too, which list the contenders and
# their abilities, and define usage, run_rounds and rows_of_table.

# Sets rounds, dir, archives, on (networks; $1 when none is named), wanted and also (contenders) from
# the other arguments. Options that are not known here go to own_option with their value.
read_arguments() {
    local network=$1
    shift
    rounds=5
    dir=
    archives=()
    on=()
    wanted=()
    also=()
    while [[ $# -gt 0 ]]; do
        case $1 in
        --rounds) rounds=${2:?} && shift ;;
        --network) on+=("${2:?}") && shift ;;
        --contender) wanted+=("${2:?}") && shift ;;
        --also) also+=("${2:?}") && shift ;;
        -*) own_option "$1" "${2-}" && shift ;;
        *) if [[ -z $dir ]]; then dir=$(realpath -e "$1"); else archives+=("$1"); fi ;;
        esac
        shift
    done
    [[ -n $dir ]] || usage
    if [[ ${#archives[@]} -eq 0 ]]; then
        mapfile -t archives < <(cd "$dir" && printf '%s\n' *.tar *.tar.* | grep -v -e '\*' -e '\.part$')
    fi
    [[ ${#on[@]} -gt 0 ]] || on=("$network")
    check_arguments
}

# Ends with the usage unless all names are known, and puts tarfs, which all is compared with, first.
check_arguments() {
    local name
    for name in "${on[@]}"; do
        [[ " ${networks[*]} " == *" $name "* ]] || usage
    done
    for name in "${wanted[@]}"; do
        is_contender "$name" || usage
    done
    for name in "${also[@]}"; do
        [[ $name == "tarfs "* ]] || usage
    done
    [[ ${#wanted[@]} -gt 0 ]] || wanted=("${contenders[@]}")
    mapfile -t wanted < <(printf '%s\n' tarfs "${wanted[@]}" | awk '!seen[$0]++')
}

is_contender() {
    local known
    for known in "${contenders[@]}"; do
        [[ $1 != "$known" ]] || return 0
    done
    return 1
}

# Runs all rounds of all archives on all networks, and prints the rows of each.
race() {
    local archive network
    for network in "${on[@]}"; do
        for archive in "${archives[@]}"; do
            select_contenders "$archive" "$network"
            run_rounds "$archive" "$network"
            rows_of_table "$archive" "$network"
        done
    done
}

# Sets racing to the contenders that archive $1 is measured with on network $2.
select_contenders() {
    local contender
    racing=()
    for contender in "${wanted[@]}" "${also[@]}"; do
        if is_available "$contender" && is_supported "$contender" "$1" "$2"; then
            racing+=("$contender")
        fi
    done
}

# Prints the contenders that were not measured.
print_missing_contenders() {
    local contender
    for contender in "${wanted[@]}"; do
        is_available "$contender" || echo "$contender: not measured, as it is not on PATH."
    done
}

# Names tarfs and those of the contenders' programs that are there with their versions, in one line.
versions() {
    local line program flag version
    line="$("$TARFS" --version) ($(git -C "$project" rev-parse --short HEAD 2>/dev/null || echo '?'))"
    for program in "${contender_programs[@]}"; do
        command -v "$program" >/dev/null || continue
        case $program in
        nginx) flag=-v ;;
        mksquashfs) flag=-version ;;
        *) flag=--version ;;
        esac
        # Each says it in its own way; the version is the first word that looks like one.
        version=$("$program" "$flag" </dev/null 2>&1 | grep -aoEm1 '[0-9]+\.[0-9]+(\.[0-9]+)?' || true)
        version=${version%%$'\n'*}
        line+=", $program ${version:-?}"
    done
    echo "$line"
}
