#!/usr/bin/env bash
# Install Chromium, for the tests of `rlcore view`. Does nothing where there is one.
#   ./scripts/install_chromium.sh
# It comes from Debian's packages, which needs root. CHROMIUM names another one.
set -euo pipefail
chromium="${CHROMIUM:-/usr/bin/chromium}"
if [ -x "$chromium" ]; then exit 0; fi
fail() { echo "install_chromium: $*" >&2; exit 2; }
if [ -n "${CHROMIUM:-}" ]; then fail "CHROMIUM=$CHROMIUM is no program"; fi
if ! command -v apt-get > /dev/null || [ "$(id -u)" != 0 ]; then
    fail "there is no $chromium, and without apt-get and root it cannot be installed: install Chromium and set CHROMIUM to its path"
fi
echo "== $chromium, from the packages of this system"
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium > /dev/null
[ -x "$chromium" ] || fail "the package chromium has brought no $chromium: set CHROMIUM to its path"
