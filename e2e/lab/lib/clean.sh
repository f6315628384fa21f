# Removing the lab, whether it was stopped or killed. Idempotent; shared by `up`, `down` and `clean`.
#
# A kill takes the processes and with them the node's namespaces. What stays: containers and shims
# (their own processes), the bridge with its routes, cgroups, files, and mounts of an image build.
# shellcheck shell=bash

# lab_mounts: mount points on the machine below the lab's folders, inner ones first.
lab_mounts() {
  awk '{ print $2 }' /proc/self/mounts | grep -E "^($LAB_DIR|$LAB_CACHE)/" | sort -r || true
}

# leftovers: everything of the lab that is on the machine, one a line; fails if there is any.
leftovers() {
  local found
  found=$(
    for p in $(cgroup_processes); do echo "process $p $(tr '\0' ' ' <"/proc/$p/cmdline" 2>/dev/null | cut -c1-80)"; done
    for p in $(recorded); do ! alive "$p" || echo "process $(pid_of "$p") ($p)"; done
    lab_mounts | sed 's/^/mount /'
    # The node's network namespaces and tables have no name on the machine: without processes and
    # mounts there are none.
    ip -o link show 2>/dev/null | sed -nE 's|^[0-9]+: (coda-lab[^:@]*).*|\1|p' | sed 's/^/link /'
    ip route show | grep -E "^($LAB_NET|$LAB_SVC)\." | sed 's/^/route /'
    if command -v nft >/dev/null; then nft list tables 2>/dev/null | grep coda-lab; fi
    cgroup_found | sed 's/^/cgroup /'
    [ ! -e "$LAB_DIR" ] || echo "folder $LAB_DIR"
  ) || true
  [ -n "$found" ] || return 0
  echo "$found"
  return 1
}

clean() {
  local name m
  cgroup_kill || die "the lab's processes do not end"
  for name in $(recorded); do
    ! alive "$name" || kill -9 "$(pid_of "$name")" 2>/dev/null || true
  done
  network_down
  for m in $(lab_mounts); do umount -l "$m" || die "$m cannot be unmounted"; done
  if [ -f "$LAB_DIR/made" ]; then
    # Only mount points that were made by us, and only while they are empty.
    tac "$LAB_DIR/made" | xargs -r rmdir --ignore-fail-on-non-empty 2>/dev/null || true
  fi
  # One file system: should anything still be mounted below, its content is not ours to delete.
  rm -rf --one-file-system "$LAB_DIR"
  cgroup_remove
}
