#!/usr/bin/env bash
# Install a package of Debian, for the tests that need its program. Does nothing where there is one.
#   ./scripts/install_debian.sh PACKAGE PROGRAM
# It needs root.
set -euo pipefail
package=$1 program=$2
if command -v "$program" > /dev/null; then exit 0; fi
fail() { echo "install_debian: $*" >&2; exit 2; }
if ! command -v apt-get > /dev/null || [ "$(id -u)" != 0 ]; then
    fail "there is no $program, and without apt-get and root it cannot be installed: install $package"
fi
echo "== $program, from the packages of this system"
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$package" > /dev/null
command -v "$program" > /dev/null || fail "the package $package has brought no $program"
