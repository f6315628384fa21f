# Processes of the lab: started in the background with a log and a recorded pid, ended by that pid.
# shellcheck shell=bash

# start_time PID: when the process started, in clock ticks since boot; fails if there is none. Kept
# beside the pid, because pids are reused: a file left by a run of last week must not get a
# stranger's process killed.
start_time() {
  local stat
  stat=$(cat "/proc/$1/stat" 2>/dev/null) || return 1
  stat=${stat##*) } # the command name may hold blanks and parentheses
  # A zombie has ended; only its parent has not looked yet.
  [ "${stat%% *}" != Z ] || return 1
  cut -d' ' -f20 <<<"$stat"
}

# bg NAME COMMAND...: start it in the background, log in $LAB_LOG/NAME.log.
bg() {
  local name=$1
  shift
  (
    cgroup_enter
    # setsid: not in the terminal's process group, so Ctrl-C does not reach it. 9: the lock.
    exec setsid "$@" >"$LAB_LOG/$name.log" 2>&1 </dev/null 9>&-
  ) &
  echo "$! $(start_time $!)" >"$LAB_PIDS/$name"
}

# pid_of NAME: its pid while it runs; fails otherwise.
pid_of() {
  local pid start
  read -r pid start 2>/dev/null <"$LAB_PIDS/$1" || return 1
  [ "$(start_time "$pid")" = "$start" ] && echo "$pid"
}

alive() { pid_of "$1" >/dev/null; }

# stop NAME: end it, with SIGKILL after 4 s.
stop() {
  local pid i
  if pid=$(pid_of "$1"); then
    kill "$pid" 2>/dev/null || true
    for ((i = 0; i < 40; i++)); do
      alive "$1" || break
      sleep .1
    done
    ! alive "$1" || kill -9 "$pid" 2>/dev/null || true
  fi
  rm -f "$LAB_PIDS/$1"
}

# recorded: names of all processes ever started by this lab, whether they still run or not.
recorded() { [ ! -d "$LAB_PIDS" ] || ls "$LAB_PIDS"; }
