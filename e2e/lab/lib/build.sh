# Programs of the lab, built from the Go modules pinned in gomod/ into $LAB_BIN.
#
# A program is built when its binary is missing or its go.mod/go.sum changed (a checksum is kept
# beside the binary), so a kept cache makes this a no-op. Everything goes through the ordinary go
# command; go.sum pins every module.
# shellcheck shell=bash

KUBE_PROGRAMS="kube-apiserver kube-controller-manager kube-scheduler kubelet kube-proxy"

# default_programs: what `lab up` needs; kubectl only if the machine has none.
default_programs() {
  # shellcheck disable=SC2086
  printf '%s\n' etcd $KUBE_PROGRAMS coredns
  PATH=${PATH%":$LAB_BIN"} command -v kubectl >/dev/null || echo kubectl
}

# program_source PROGRAM: prints "MODULE-FOLDER PACKAGE", or fails.
program_source() {
  case $1 in
    etcd) echo etcd go.etcd.io/etcd/server/v3 ;;
    coredns) echo coredns github.com/coredns/coredns ;;
    helm) echo helm helm.sh/helm/v4/cmd/helm ;;
    kubectl) echo kube k8s.io/kubernetes/cmd/kubectl ;;
    kube-apiserver | kube-controller-manager | kube-scheduler | kubelet | kube-proxy)
      echo kube "k8s.io/kubernetes/cmd/$1"
      ;;
    *) return 1 ;;
  esac
}

module_sum() { cat "$LAB_HOME/gomod/$1/go.mod" "$LAB_HOME/gomod/$1/go.sum" | sha256sum | cut -c1-16; }

is_built() { # program
  local module
  read -r module _ < <(program_source "$1")
  [ -x "$LAB_BIN/$1" ] && [ "$(cat "$LAB_BIN/.$1.sum" 2>/dev/null)" = "$(module_sum "$module")" ]
}

link_flags() { # module-folder
  local version package=k8s.io/component-base/version
  printf -- '-s -w'
  [ "$1" = kube ] || return 0
  # Without gitVersion the server says v0.0.0 and clients' version checks fail.
  version=$(awk '$1 == "require" && $2 == "k8s.io/kubernetes" { print $3 }' "$LAB_HOME/gomod/kube/go.mod")
  printf ' -X %s.gitVersion=%s -X %s.gitMajor=1 -X %s.gitMinor=%s' \
    $package "$version" $package $package "$(cut -d. -f2 <<<"$version")"
}

go_build() { # program
  local module package
  read -r module package < <(program_source "$1")
  # Beside the target first: a build that is interrupted leaves no half-written program.
  # CGO_ENABLED=0: static, so it runs in any image and needs no C compiler.
  # nice: builds give way to whatever else the machine does.
  (
    cd "$LAB_HOME/gomod/$module" &&
      CGO_ENABLED=0 GOFLAGS="-mod=readonly -buildvcs=false -trimpath" \
        nice -n 10 go build -ldflags "$(link_flags "$module")" -o "$LAB_BIN/.$1.part" "$package"
  ) || return 1
  mv "$LAB_BIN/.$1.part" "$LAB_BIN/$1"
  module_sum "$module" >"$LAB_BIN/.$1.sum"
}

# build [PROGRAM...]: build what is missing.
build() {
  local programs missing=() p n=0 start
  programs=("$@")
  [ $# -gt 0 ] || mapfile -t programs < <(default_programs)
  for p in "${programs[@]}"; do
    program_source "$p" >/dev/null || die "unknown program $p (known: etcd $KUBE_PROGRAMS kubectl coredns helm)"
    is_built "$p" || missing+=("$p")
  done
  [ ${#missing[@]} -gt 0 ] || return 0
  need_command go
  mkdir -p "$LAB_BIN"
  for p in "${missing[@]}"; do
    n=$((n + 1)) start=$SECONDS
    say "building $p ($n of ${#missing[@]})"
    with_progress "$p ($n of ${#missing[@]})" go_build "$p" || die "building $p failed"
    say "built $p in $((SECONDS - start)) s, $(du -m "$LAB_BIN/$p" | cut -f1) MB"
  done
}
