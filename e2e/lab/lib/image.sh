# Images without a registry: built by buildah on a base made of Debian packages, saved as tar files
# that the node imports. Names start with localhost/; pods use imagePullPolicy IfNotPresent or Never.
# shellcheck shell=bash

# Layers live in the lab's cache, apart from the machine's own container storage.
buildah() { command buildah --root "$LAB_CACHE/buildah/root" --runroot "$LAB_CACHE/buildah/run" "$@"; }

# image_tar NAME:TAG: the file it is saved in.
image_tar() {
  case $1 in
    "$PAUSE_IMAGE") echo "$LAB_IMAGES/pause.tar" ;;
    *) echo "$LAB_IMAGES/$(tr '/:' '__' <<<"${1#localhost/}").tar" ;;
  esac
}

# bud NAME:TAG DOCKERFILE CONTEXT [ARGUMENT...]: build, with cached layers.
# chroot isolation: no OCI runtime, no cgroups, no network setup, no raised limits.
# --pull=false and a localhost/ base: no registry is ever asked.
bud() {
  local name=$1 dockerfile=$2 context=$3
  shift 3
  buildah bud --quiet --isolation chroot --pull=false --layers --tag "$name" --file "$dockerfile" "$@" "$context" >/dev/null
}

# image_save NAME:TAG: to its tar, and into the node if one runs.
image_save() {
  local tar
  tar=$(image_tar "$1")
  mkdir -p "$LAB_IMAGES"
  rm -f "$tar.part"
  buildah push --quiet "$1" "docker-archive:$tar.part:$1"
  mv "$tar.part" "$tar"
  say "saved $1 ($(du -m "$tar" | cut -f1) MB) in $tar"
  if alive containerd; then load "$tar"; fi
}

# up_to_date NAME:TAG FILE...: whether the image was made from these files as they are now.
up_to_date() {
  local name=$1
  shift
  [ -f "$(image_tar "$name")" ] && [ "$(cat "$(image_tar "$name").sum" 2>/dev/null)" = "$(cat "$@" | sha256sum)" ] &&
    buildah inspect --type image "$name" >/dev/null 2>&1
}
made_from() { # name:tag file...
  local name=$1
  shift
  cat "$@" | sha256sum >"$(image_tar "$name").sum"
}

image_pause() {
  local d=$LAB_HOME/images/pause context=$LAB_CACHE/pause
  ! up_to_date $PAUSE_IMAGE "$d"/* || return 0
  need_command buildah go
  mkdir -p "$context"
  CGO_ENABLED=0 GOFLAGS="-buildvcs=false -trimpath" go build -ldflags '-s -w' -o "$context/pause" "$d/main.go"
  bud $PAUSE_IMAGE "$d/Dockerfile" "$context"
  image_save $PAUSE_IMAGE
  made_from $PAUSE_IMAGE "$d"/*
}

# image_base: Debian 12 and Python 3.11; made once.
image_base() {
  local d context=$LAB_CACHE/base
  d=$(cd "$LAB_HOME/../../images/base" && pwd)
  ! up_to_date $BASE_IMAGE "$d"/* || return 0
  need_command buildah mmdebstrap
  mkdir -p "$context"
  say "building $BASE_IMAGE from Debian packages"
  with_progress "$BASE_IMAGE" "$d/rootfs" "$context/rootfs.tar" || die "the base image could not be made"
  bud $BASE_IMAGE "$d/Dockerfile" "$context"
  rm -rf "$context"
  image_save $BASE_IMAGE
  made_from $BASE_IMAGE "$d"/*
}

# machine_volumes FOLDER: --volume arguments that give a build this machine's access to packages:
# its CA certificates, pip settings and apt sources. They are mounted, so nothing of them is in the image.
machine_volumes() {
  local p
  PIP_CONFIG_OUT=$1/pip.conf python3 "$LAB_HOME/lib/pip_conf.py" >"$1/paths"
  VOLUMES=(--volume "$1/pip.conf:/etc/pip.conf:ro" --volume /etc/ssl/certs:/etc/ssl/certs:ro)
  while read -r p; do VOLUMES+=(--volume "$p:$p:ro"); done <"$1/paths"
  for p in /etc/apt/sources.list /etc/apt/sources.list.d; do
    [ ! -s "$p" ] || VOLUMES+=(--volume "$p:$p:ro")
  done
}

# image_build NAME:TAG DOCKERFILE CONTEXT [buildah arguments, such as --build-arg X=Y]
image_build() {
  [ $# -ge 3 ] || die "usage: lab image build NAME:TAG DOCKERFILE CONTEXT [--build-arg X=Y]..."
  local name=$1 dockerfile=$2 context=$3 start=$SECONDS settings VOLUMES
  shift 3
  [[ $name == localhost/*:* ]] || die "the name of an image must look like localhost/coda/NAME:TAG, not $name"
  [ -f "$dockerfile" ] || die "no file $dockerfile"
  image_base
  settings=$(mktemp -d)
  machine_volumes "$settings"
  with_progress "building $name" bud "$name" "$dockerfile" "$context" \
    --build-arg "BASE=$BASE_IMAGE" "${VOLUMES[@]}" "$@" || { rm -rf "$settings"; die "building $name failed"; }
  rm -rf "$settings"
  say "built $name in $((SECONDS - start)) s"
  image_save "$name"
}

# image_remove NAME:TAG: from the cache; `lab up` imports it no more.
image_remove() {
  local tar
  tar=$(image_tar "$1")
  rm -f "$tar" "$tar.sum"
  buildah rmi "$1" >/dev/null 2>&1 || true
}

image() {
  local command=${1:-list}
  [ $# = 0 ] || shift
  case $command in
    pause | base) image_"$command" ;;
    build) image_build "$@" ;;
    remove) image_remove "${1:?usage: lab image remove NAME:TAG}" ;;
    list) (cd "$LAB_IMAGES" 2>/dev/null && du -m -- *.tar 2>/dev/null | awk '{ printf "%5d MB  %s\n", $1, $2 }') || true ;;
    *) die "unknown: lab image $command (pause, base, build, remove, list)" ;;
  esac
}
