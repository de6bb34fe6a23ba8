# Make or reuse the virtual environment of this checkout; sourced by demo.sh and test.sh.
#
# use_venv EXTRAS installs the package, editable, with the extras and the tested versions of
# constraints.txt into .venv, then puts that first in PATH. PYTHON names another interpreter.
# An environment made from the same files is reused as it is.

use_venv() {
    local extras=$1 python=${PYTHON:-python3} stamp wanted
    if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
        echo "Python 3.10 or newer is needed; set PYTHON to one (tried: $python)" >&2
        return 1
    fi
    stamp=.venv/installed-${extras//,/-}
    # The path counts: an editable install and the scripts of an environment point to it.
    wanted=$(
        "$python" - "$PWD" "$extras" pyproject.toml constraints.txt <<'PY'
import hashlib, pathlib, sys
words, files = sys.argv[1:3], sys.argv[3:]
digest = hashlib.sha256(repr((sys.version, words)).encode())
for file in files:
    digest.update(pathlib.Path(file).read_bytes())
print(digest.hexdigest())
PY
    )
    if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ] || ! .venv/bin/python -c ''; then
        if ! .venv/bin/python -c '' 2>/dev/null; then
            echo "making .venv"
            "$python" -m venv --clear .venv
        fi
        echo "installing int8moe_compile[$extras] into .venv (several minutes the first time)"
        rm -f "$stamp"
        .venv/bin/python -m pip install --quiet --disable-pip-version-check \
            -c constraints.txt -e ".[$extras]"
        echo "$wanted" >"$stamp"
    fi
    PATH=$PWD/.venv/bin:$PATH
    export PATH
}
