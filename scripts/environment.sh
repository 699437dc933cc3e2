# The project's virtual environment. Sourced by quickstart.sh and test.sh, which then call `environment [EXTRA]`.
#
#   PYTHON             the interpreter to use; by default the newest of 3.13, 3.12 and 3.11 that runs here, on PATH or in
#                      pyenv, and a newer one only if there is none of these (the suite was not run on it)
#   ROLLOUT_JAX_VENV   the folder of the environment; by default .venv in the project's root
#
# Afterwards $python is the environment's interpreter. What was installed is noted in the environment, so a second call
# costs nothing. An environment made here is made anew if that was cut short, or if $PYTHON is of another version; one
# made by somebody else is only installed into.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${ROLLOUT_JAX_VENV:-$root/.venv}
python=$venv/bin/python
unset PYTHONDONTWRITEBYTECODE # without bytecode, each start takes seconds longer

fail() {
  echo "error: $*" >&2
  exit 1
}

# Prints the version (3.12.1) of a Python of at least 3.11 that runs and can make environments; fails for any other.
version_of() {
  "$1" -c 'import ensurepip, sys, venv; assert sys.version_info >= (3, 11); print(sys.version.split()[0])' 2>/dev/null
}

# Prints the interpreter to make the environment with.
find_python() {
  local minor candidate
  if [ -n "${PYTHON:-}" ]; then
    version_of "$PYTHON" >/dev/null || fail "PYTHON=$PYTHON is not a Python of at least 3.11 with venv and ensurepip."
    echo "$PYTHON"
    return
  fi
  for minor in 13 12 11 14 15; do
    for candidate in "python3.$minor" "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"3.$minor".*/bin/python python3; do
      case "$(version_of "$candidate")" in 3.$minor.*)
        echo "$candidate"
        return
        ;;
      esac
    done
  done
  fail "No Python of at least 3.11 with venv and ensurepip was found (on Debian: apt install python3-venv)." \
    "Set PYTHON to the path of one."
}

# Removes an environment that was made here; the mark goes last, so that a removal cut short is known as well.
remove_ours() {
  rm -f "$venv/.whole"
  find "$venv" -mindepth 1 -maxdepth 1 ! -name .ours -exec rm -rf {} +
  rm -rf "$venv"
}

# Leaves an environment in $venv that works, made anew where that is needed.
make_environment() {
  local interpreter
  if [ -e "$venv/.ours" ]; then
    if [ ! -e "$venv/.whole" ]; then
      echo "The environment in $venv was left half made: making it anew."
      remove_ours
    elif [ "$(version_of "${PYTHON:-$python}")" != "$(version_of "$python" || echo none)" ]; then
      echo "The environment in $venv is of another Python: making it anew."
      remove_ours
    fi
  fi
  if [ ! -e "$venv/pyvenv.cfg" ]; then
    interpreter=$(find_python) || exit 1
    echo "Making an environment in $venv with Python $(version_of "$interpreter") ($interpreter)."
    { mkdir -p "$venv" && touch "$venv/.ours"; } || fail "Cannot write $venv. Set ROLLOUT_JAX_VENV to another folder."
    "$interpreter" -m venv "$venv" || fail "venv failed; see above."
  fi
  version_of "$python" >/dev/null ||
    fail "$venv holds no working Python of at least 3.11. Remove it, or set ROLLOUT_JAX_VENV to another folder."
}

# Installs requirements.txt, and the packages of an extra of pyproject.toml if one is named.
environment() {
  local extra=${1:-} wanted installed quiet=--quiet
  make_environment
  wanted=$(cat "$root/requirements.txt")
  if [ -n "$extra" ]; then
    wanted+=$'\n'$("$python" -c "import tomllib; project = tomllib.load(open('$root/pyproject.toml', 'rb'))['project']
print(*project['optional-dependencies']['$extra'], sep='\n')")
  fi
  installed=$venv/installed${extra:+-$extra}.txt
  if [ "$wanted" = "$(cat "$installed" 2>/dev/null)" ]; then
    return
  fi
  if [ -t 1 ]; then quiet=; fi
  echo "Installing what the project needs${extra:+ for $extra} (about 1 GB; a minute or two on a fast line, only once)."
  rm -f "$venv/.whole" "$venv"/installed*.txt
  echo "$wanted" >"$venv/wanted.txt"
  "$python" -m pip install $quiet --compile --disable-pip-version-check -r "$venv/wanted.txt" ||
    fail "The installation failed; see above. If Python $(version_of "$python") is too new for a package, set PYTHON."
  mv "$venv/wanted.txt" "$installed"
  cp "$root/requirements.txt" "$venv/installed.txt"
  touch "$venv/.whole"
}
