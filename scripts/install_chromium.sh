#!/usr/bin/env bash
# Install Chromium, for the tests of `rlcore view`. Does nothing where there is one.
#   ./scripts/install_chromium.sh
# It comes from Debian's packages, which needs root. CHROMIUM names another one.
set -euo pipefail
if [ -z "${CHROMIUM:-}" ]; then exec "$(dirname "$0")/install_debian.sh" chromium /usr/bin/chromium; fi
[ -x "$CHROMIUM" ] || { echo "install_chromium: CHROMIUM=$CHROMIUM is no program" >&2; exit 2; }
