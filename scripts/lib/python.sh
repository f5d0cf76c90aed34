# shellcheck shell=bash
# An environment of Python for the package in src/python; sourced, never run. Needs common.sh and apt.sh.

target_directory() { (cd "$project" && realpath -m "${CARGO_TARGET_DIR:-target}"); }

# Sets PYTHON to an interpreter in the build directory that has the packages $@ of tests/python/requirements.txt, or
# all of them.
python_environment() {
    local pins=$project/tests/python/requirements.txt place
    place=$(target_directory)/python
    python3 -c "import venv, ensurepip" 2>/dev/null ||
        apt_install python3 python3-venv
    PYTHON=$place/bin/python
    if [[ ! -x $PYTHON ]]; then
        announce "installing Python packages: ${*:-those of the tests}" "30 seconds"
        python3 -m venv "$place"
    fi
    "$PYTHON" -m pip install --quiet --disable-pip-version-check --constraint "$pins" \
        "${@:---requirement=$pins}"
    export PYTHON
}
