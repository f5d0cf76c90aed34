# shellcheck shell=bash
# Programs that unpack archives: tarfs, the usual tools, and the floors of tests/bench.
#
# TARFS and BENCHES name the programs. A contender is called as it is shown in tables; tarfs with
# arguments is a contender, too.

readonly contenders=(tarfs floor 'floor verified' inflate 'wget|tar' 'aria2c;tar' 'curl|bsdtar'
    fastar 'fastar tuned' tar)
# The programs behind them, whose versions count.
# shellcheck disable=SC2034 # For lib/race.sh.
readonly contender_programs=(tar bsdtar wget curl aria2c fastar lz4 zstd xz bzip2 gzip nginx)
# Fails where it cannot keep a time or a name; what counts is that all entries are there.
readonly tar_command='tar -xp --numeric-owner --warning=no-timestamp'

# Whether contender $1 is installed.
is_available() {
    case $1 in
    fastar*) command -v fastar >/dev/null ;;
    *) true ;;
    esac
}

# Whether contender $1 can unpack archive $2 on network $3; or, for a floor, has something to say.
is_supported() {
    case $1:$3:$2 in
    tarfs*) true ;;
    inflate:plain:*.gz | inflate:none:*.gz) true ;;
    inflate:*) false ;;
    tar:none:*) true ;;
    tar:* | *:none:*) false ;;
    floor*-linked.tar.lz4) false ;;
    floor*.tar.lz4 | floor:*.tar) true ;;
    floor*) false ;;
    fastar*.tar | fastar*.tar.gz | fastar*.tar.lz4) true ;;
    fastar*) false ;;
    *) true ;;
    esac
}

# The shell line with which contender $1 unpacks archive $2 of the directory $4, as network $3 brings
# it, into the directory $5/tree.
line_of() {
    local place tree="-C '$5/tree'" tar
    place="'$(archive_location "$2" "$3" "$4")'"
    tar="$tar_command $(tar_option "$2") $tree"
    case $1 in
    tarfs) echo "'$TARFS' materialize -q --numeric-owner $place $tree" ;;
    'tarfs '*) echo "'$TARFS' materialize -q --numeric-owner ${1#tarfs } $place $tree" ;;
    floor) echo "'$BENCHES/floor' $place '$5/tree' $(floor_connections "$3")" ;;
    'floor verified')
        echo "'$BENCHES/floor' --verify $place '$5/tree' $(floor_connections "$3")"
        ;;
    inflate) echo "'$BENCHES/inflate' '$4/$2' >/dev/null" ;;
    tar) echo "$tar -f $place || true" ;;
    'wget|tar') echo "wget -qO- $place | $tar -f - || true" ;;
    'curl|bsdtar')
        echo "curl -sf $place | bsdtar -xp --numeric-owner $tree -f - 2>/dev/null || true"
        ;;
    'aria2c;tar')
        echo "aria2c -q -x16 -s16 -d '$5' -o archive $place && $tar -f '$5/archive' || true"
        ;;
    fastar) echo "fastar $place $tree >/dev/null 2>&1 || true" ;;
    'fastar tuned')
        echo "fastar --download-workers 16 --chunk-size 8 --write-workers 8 $place $tree" \
            ">/dev/null 2>&1 || true"
        ;;
    esac
}

# Settings that serve the floor best: it adapts to nothing.
floor_connections() {
    if [[ $1 == plain ]]; then echo 4; else echo 16; fi
}
