# shellcheck shell=bash
# Sourced by quickstart.sh and test.sh from the repository's root: makes .venv if absent, installs what is missing, activates it.
#
#   setup_venv [EXTRA]   the package with one extra, or with none
#
# PYTHON      interpreter that makes the environment (default: python3)
# TORCH_SPEC  what pip is given to install PyTorch (default: torch==2.13.0 without a GPU, torch with one)

setup_venv() {
    local extra=${1:-} python=${PYTHON:-python3} torch_spec stamp wanted
    if [ ! -x .venv/bin/python ]; then
        if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
            echo "PYTHON=$python: needs Python 3.10 or newer; set PYTHON to one" >&2
            return 1
        fi
        echo "making .venv with $("$python" --version)"
        "$python" -m venv .venv
    fi

    if command -v nvidia-smi >/dev/null 2>&1; then
        torch_spec=${TORCH_SPEC:-torch}
    else
        torch_spec=${TORCH_SPEC:-torch==2.13.0}
    fi
    # Also the packages: an editable install does not see a top-level package that was added after it.
    stamp=.venv/installed-${extra:-core}
    wanted=$( (cat setup.py; echo "$torch_spec" ./*/__init__.py) | sha256sum)
    if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
        local pip=(.venv/bin/python -m pip install --quiet --disable-pip-version-check)
        echo "installing $torch_spec"
        # First and alone, so that no other requirement can pull another build of it.
        "${pip[@]}" "$torch_spec"
        echo "installing megatron-trace${extra:+[$extra]}"
        "${pip[@]}" -e ".${extra:+[$extra]}"
        echo "$wanted" >"$stamp"
    fi
    PATH=$PWD/.venv/bin:$PATH
    export PATH
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
}
