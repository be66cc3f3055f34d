#!/usr/bin/env bash
# Runs the native tests, or the tests in the arguments, under the address and undefined-behaviour
# sanitizers, with the python on the PATH. Needs nanobind, CMake, GCC and the package's test
# dependencies. The build takes some minutes.
set -euo pipefail
cd "$(dirname "$0")/.."

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cmake -S native -B "$work/build" -DPython_EXECUTABLE="$(command -v python)" \
  -DCMAKE_BUILD_TYPE=Debug -DTWOSTROKE_SANITIZE=ON >/dev/null
cmake --build "$work/build" --parallel "$(nproc)" >/dev/null

# A copy of the package, so that the slow module is not used outside of this test.
cp -r twostroke tests pyproject.toml "$work"
rm -f "$work"/twostroke/_native*.so
cp "$work"/build/_native*.so "$work/twostroke"
cd "$work"

# Python itself is not sanitized, so the sanitizer libraries must be loaded before it. libstdc++ is
# needed for exceptions.
for name in libasan.so libubsan.so libstdc++.so; do
  preload="${preload:+$preload:}$(g++ -print-file-name=$name)"
done
export LD_PRELOAD=$preload
export ASAN_OPTIONS=detect_leaks=0  # Python frees little memory at its end
export UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1
if [ $# -eq 0 ]; then
  set -- tests/kernels/test_native*.py
fi
python -m pytest -p no:cacheprovider --capture=sys "$@"  # reports go past pytest
