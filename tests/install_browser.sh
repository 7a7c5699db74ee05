#!/bin/sh
# Makes sure that the browser tests find Chromium: installs Debian's package where that is possible, else says what to do.
set -eu

for name in chromium chromium-browser google-chrome google-chrome-stable; do
    if command -v "$name" >/dev/null 2>&1; then
        exit 0
    fi
done
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    echo "Installing Chromium for the browser tests."
    export DEBIAN_FRONTEND=noninteractive
    if apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium; then
        exit 0
    fi
fi
echo "No Chromium was found: the browser tests are skipped. Install it (Debian: apt-get install chromium) to run them."
