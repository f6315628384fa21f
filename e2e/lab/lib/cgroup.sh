# cgroups of the lab (v1, or v1 with an empty v2 beside it: what machines without systemd have).
#
#   <caller's memory cgroup>/coda-lab/host    every process the lab starts (pids hierarchy only)
#   <caller's memory cgroup>/coda-lab/node1   the kubelet's cgroupRoot, so pods count against the caller
#
# "host" exists so that everything can be found and ended without knowing names: containerd's shims,
# for one, are nobody's child once containerd was killed.
# shellcheck shell=bash

CGROUP_NAME=coda-lab

# The path is the caller's own in the memory hierarchy: a limit set there also binds the pods. Kept
# while the lab is up, as a later caller may have another one.
cgroup_path() {
  local own
  cat "$LAB_DIR/cgroup" 2>/dev/null && return 0
  own=$(awk -F: '$2 == "memory" { print $3 }' /proc/self/cgroup)
  echo "${own%/}/$CGROUP_NAME"
}

cgroup_hierarchies() {
  local h
  for h in /sys/fs/cgroup/*/; do
    h=${h%/}
    # A link is a second name of a hierarchy (cpu -> cpu,cpuacct).
    [ -L "$h" ] || [ ! -f "$h/cgroup.procs" ] || echo "$h"
  done
}

# cgroup_make PATH: in every hierarchy. A new cpuset has no CPUs and no memory nodes, and takes no
# process until it does: copied down level by level.
cgroup_make() {
  local h level parts part f
  for h in $(cgroup_hierarchies); do
    mkdir -p "$h$1"
    [ -f "$h/cpuset.cpus" ] || continue
    level=$h
    IFS=/ read -ra parts <<<"${1#/}"
    for part in "${parts[@]}"; do
      for f in cpuset.cpus cpuset.mems; do
        [ -n "$(cat "$level/$part/$f")" ] || cat "$level/$f" >"$level/$part/$f"
      done
      level=$level/$part
    done
  done
}

cgroup_up() {
  cgroup_path >"$LAB_DIR/cgroup.new"
  mv "$LAB_DIR/cgroup.new" "$LAB_DIR/cgroup"
  cgroup_make "$(cgroup_path)/host"
  cgroup_make "$(cgroup_path)/$NODE"
}

# cgroup_enter: the calling (sub)shell becomes one of the lab's processes.
cgroup_enter() { echo "$BASHPID" >"/sys/fs/cgroup/pids$(cgroup_path)/host/cgroup.procs"; }

# cgroup_found: the lab's cgroups in all hierarchies, below whichever caller made them.
cgroup_found() { find /sys/fs/cgroup -type d -name "$CGROUP_NAME" -prune 2>/dev/null || true; }

# cgroup_processes: pids of all processes in them, containers included.
cgroup_processes() {
  local d
  for d in $(cgroup_found); do
    find "$d" -name cgroup.procs -exec cat {} + 2>/dev/null || true
  done | sort -nu
}

# cgroup_kill: end them all at once; much faster than one `ctr task kill` each. Repeated, because a
# shim may start one more while it is asked for.
cgroup_kill() {
  local i pids
  for ((i = 0; i < 50; i++)); do
    pids=$(cgroup_processes)
    [ -n "$pids" ] || return 0
    # shellcheck disable=SC2086
    kill -9 $pids 2>/dev/null || true
    sleep .1
  done
  warn "processes that do not end: $pids"
  return 1
}

cgroup_remove() {
  local d
  for d in $(cgroup_found); do
    find "$d" -depth -type d -exec rmdir {} \; 2>/dev/null || true
    # The caller's path was made by us in the hierarchies where it is not in a cgroup; keep it where
    # it is used.
    (cd /sys/fs/cgroup && rmdir -p --ignore-fail-on-non-empty "$(dirname "${d#/sys/fs/cgroup/}")" 2>/dev/null) || true
  done
}
