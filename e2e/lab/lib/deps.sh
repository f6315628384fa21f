# Debian packages that the lab uses, from the machine's own apt sources.
# shellcheck shell=bash

# To run a node.
NODE_PACKAGES="containerd runc containernetworking-plugins nftables iproute2 procps util-linux openssl curl"
# To build images.
IMAGE_PACKAGES="buildah mmdebstrap python3-pip"

installed() { dpkg-query -W -f '${Status}' "$1" 2>/dev/null | grep -q '^install ok installed$'; }

deps() {
  local p missing=()
  for p in $NODE_PACKAGES $IMAGE_PACKAGES; do installed "$p" || missing+=("$p"); done
  if [ ${#missing[@]} -gt 0 ]; then
    say "installing Debian packages: ${missing[*]}"
    # Recommended packages would bring a whole container engine with its services.
    export DEBIAN_FRONTEND=noninteractive
    with_progress "apt-get" apt-get update -qq || die "apt-get update failed"
    with_progress "apt-get" apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null || die "apt-get install failed"
  fi
  command -v go >/dev/null || die "Go is not installed; the lab needs 1.26 or later to build its programs"
  say "all packages are installed"
}
