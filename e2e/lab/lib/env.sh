# Settings and small functions shared by every part of the lab. Sourced, never run.
# Each part (one file in lib/) only defines functions; `lab` sources them all and dispatches.
# shellcheck shell=bash disable=SC2034

LAB_HOME=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

# Kept between runs: the built programs, the images and the layers they are built from. Outside the
# repository, so that a fresh checkout starts warm.
LAB_CACHE=${CODA_LAB_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/coda-lab}
LAB_BIN=$LAB_CACHE/bin
LAB_IMAGES=$LAB_CACHE/images # every *.tar in it is imported by `lab up`

# State of the one running lab, removed by `lab down`. Short, because unix sockets live in it and
# their path ends at 107 bytes.
LAB_DIR=${CODA_LAB_DIR:-/tmp/coda-lab}
LAB_LOG=$LAB_DIR/log
LAB_PIDS=$LAB_DIR/pids
PKI=$LAB_DIR/pki

# Fixed addresses: one lab on a machine at a time. The lab's traffic stays in these two ranges and 127/8.
LAB_NET=10.244.0        # /24, split in three (see lib/network.sh)
LAB_SVC=10.96           # /16: ClusterIPs; .0.1 the API server, .0.10 DNS
LAB_IP=$LAB_NET.1       # the control plane, on the machine's side of the bridge
LAB_BRIDGE=coda-lab0
LAB_API=https://$LAB_IP:6443

NODE=node1
NODE_IP=$LAB_NET.2
NODE_PODS=$LAB_NET.128/25 # pods .130-.254, gateway .129
NODE_PODS_FIRST=$LAB_NET.130 NODE_PODS_LAST=$LAB_NET.254 NODE_PODS_GATEWAY=$LAB_NET.129

PAUSE_IMAGE=localhost/coda/pause:1
BASE_IMAGE=localhost/coda/base:python3.11

# After the machine's own: a kubectl that had to be built, helm.
PATH=$PATH:$LAB_BIN
export PATH KUBECONFIG=$PKI/admin.conf

say() { printf '[%3ds] %s\n' "$SECONDS" "$*"; }
warn() { echo "lab: $*" >&2; }
die() {
  warn "$@"
  exit 1
}

# need PROGRAM...: stop unless these programs of the lab are built.
need() {
  local b
  for b; do [ -x "$LAB_BIN/$b" ] || die "$b is not built yet: run '$LAB_HOME/lab build'"; done
}

# need_command COMMAND...: stop unless the machine has these commands.
need_command() {
  local c
  for c; do command -v "$c" >/dev/null || die "$c is not installed: run '$LAB_HOME/lab deps'"; done
}

# waitfor SECONDS COMMAND...: repeat the command until it succeeds, quietly; 1 if it never did.
waitfor() {
  local end=$((SECONDS + $1))
  shift
  until "$@" >/dev/null 2>&1; do
    [ $SECONDS -lt $end ] || return 1
    sleep .2
  done
}

# with_progress WHAT COMMAND...: run a slow command; every 15 s say that it still runs.
with_progress() {
  local what=$1 start=$SECONDS ticker rc=0
  shift
  (
    exec 9>&- # the lock is not held by this
    # A read that nothing answers is a sleep without a process to clean up. The ticker of a lab command
    # that was killed ends by itself.
    while read -rt 15 _ || kill -0 $$ 2>/dev/null; do say "$what: still running, $((SECONDS - start)) s"; done <> <(:)
  ) &
  ticker=$!
  "$@" || rc=$?
  kill $ticker 2>/dev/null || true
  wait $ticker 2>/dev/null || true
  return $rc
}

# lock: one lab command that changes something at a time. Released when the command ends.
lock() {
  mkdir -p "$LAB_CACHE"
  exec 9>"$LAB_CACHE/lock"
  flock -n 9 && return 0
  say "waiting for another lab command to end"
  flock 9
}
