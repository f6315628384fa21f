# node1: containerd, kubelet and kube-proxy in a network and a mount namespace of their own.
#
# The namespaces belong to the process "node1", which only sleeps. The mount namespace sees the
# machine's files (hostPath works, new mounts of the machine appear too), but nothing is mounted
# from inside it on the machine: when its processes end, however they end, all overlays, volumes and
# pod namespaces are gone with it. The paths that are fixed in the programs are redirected into
# $LAB_DIR/node1 for the same reason.
# shellcheck shell=bash

NODE_DIR=$LAB_DIR/$NODE

# Fixed paths: shim sockets; CNI's result cache; device plugins (whatever --root-dir says); symbolic
# links to pod logs.
NODE_REDIRECTED="/run/containerd /var/lib/cni /var/lib/kubelet /var/log/containers"

# in_node COMMAND...: run a command as if on the node.
in_node() { nsenter --target "$(pid_of $NODE)" --mount --net "$@"; }
bg_in_node() { # name command...
  local name=$1
  shift
  bg "$name" nsenter --target "$(pid_of $NODE)" --mount --net "$@"
}

ctr() { command ctr --address "$NODE_DIR/containerd.sock" --namespace k8s.io "$@"; }

node_start() {
  local p
  for p in $NODE_REDIRECTED; do
    # `lab clean` removes the mount points that we had to make here.
    [ -d "$p" ] || { mkdir -p "$p" && echo "$p" >>"$LAB_DIR/made"; }
    mkdir -p "$NODE_DIR/redirected$p"
  done
  # slave: sees later mounts of the machine, gives none back. Then shared again within the node, or
  # volumes with mountPropagation do not work. /dev/shm: shared memory of hostIPC pods ends with the node.
  # shellcheck disable=SC2016
  bg $NODE unshare --mount --net --propagation slave sh -euc '
    mount --make-rshared /
    for p in $2; do mount --bind "$1/redirected$p" "$p"; done
    mount -t tmpfs -o mode=1777 tmpfs /dev/shm
    : >"$1/ready"
    exec sleep infinity
  ' sh "$NODE_DIR" "$NODE_REDIRECTED"
  waitfor 10 test -f "$NODE_DIR/ready" || die "no namespaces for the node, see $LAB_LOG/$NODE.log"
  node_network "$(pid_of $NODE)"
}

containerd_start() {
  local d=$NODE_DIR
  mkdir -p "$d/cni"
  cat >"$d/containerd.toml" <<T
version = 2
root = "$d/root"
state = "$d/state"
[grpc]
  address = "$d/containerd.sock"
[plugins."io.containerd.internal.v1.opt"]
  path = "$d/opt"                             # default /opt/containerd
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "$PAUSE_IMAGE"              # localhost/...: never pulled
  netns_mounts_under_state_dir = true         # not in the machine's /run/netns
  restrict_oom_score_adj = true               # without CAP_SYS_RESOURCE a score below our own is EPERM
  disable_apparmor = true                     # not in every kernel
  stream_server_address = "127.0.0.1"         # the node's own loopback
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"                  # Debian's containernetworking-plugins
    conf_dir = "$d/cni"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
      SystemdCgroup = false                   # no systemd here
      Root = "$d/runc"                        # default /run/containerd/runc
T
  # ptp, not bridge: every packet between pods is routed, so that kube-proxy's rewriting of a Service
  # whose endpoint is on the same node works without the br_netfilter sysctl. No hostPort: the plugin
  # for it needs iptables.
  cat >"$d/cni/10-coda-lab.conflist" <<T
{"cniVersion": "0.4.0", "name": "coda-lab", "plugins": [{"type": "ptp", "ipMasq": false, "ipam": {
  "type": "host-local", "dataDir": "$d/cni-state", "routes": [{"dst": "0.0.0.0/0"}], "ranges": [[{
    "subnet": "$NODE_PODS", "gateway": "$NODE_PODS_GATEWAY",
    "rangeStart": "$NODE_PODS_FIRST", "rangeEnd": "$NODE_PODS_LAST"}]]}}]}
T
  bg_in_node containerd containerd --config "$d/containerd.toml"
  waitfor 20 ctr version || die "containerd does not answer, see $LAB_LOG/containerd.log"
}

kubelet_start() {
  local d=$NODE_DIR files
  files=$(ulimit -Hn)
  : >"$d/resolv.conf"
  cat >"$d/kubelet.yaml" <<T
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
failCgroupV1: false                   # 1.35 and later refuse to start on cgroup v1 otherwise
cgroupDriver: cgroupfs                # no systemd
cgroupRoot: $(cgroup_path)/$NODE      # below the caller's memory cgroup
oomScoreAdj: 0                        # the default -999 is EPERM without CAP_SYS_RESOURCE
maxOpenFiles: ${files/unlimited/1000000} # the default 1000000 is EPERM above the machine's hard limit
containerRuntimeEndpoint: unix://$d/containerd.sock
address: $NODE_IP
authentication: {anonymous: {enabled: false}, webhook: {enabled: true}, x509: {clientCAFile: $PKI/ca.crt}}
authorization: {mode: Webhook}
tlsCertFile: $PKI/$NODE.crt
tlsPrivateKeyFile: $PKI/$NODE.key
clusterDomain: cluster.local
clusterDNS: [$LAB_SVC.0.10]
resolvConf: $d/resolv.conf            # empty: pods with dnsPolicy Default must not ask the machine's resolver
failSwapOn: false
makeIPTablesUtilChains: false         # kube-proxy uses nftables
localStorageCapacityIsolation: false  # the kubelet cannot find out about every kind of disk
evictionHard: {memory.available: 100Mi}
imageGCHighThresholdPercent: 100      # never delete images that no registry could bring back
imageGCLowThresholdPercent: 99
podLogsDir: $d/podlogs
volumePluginDir: $d/volume-plugins
nodeStatusUpdateFrequency: 2s         # 10 s by default; how soon a change of device health shows in the node's status
nodeStatusReportFrequency: 2s
T
  bg_in_node kubelet "$LAB_BIN/kubelet" --config="$d/kubelet.yaml" --kubeconfig="$PKI/$NODE.conf" \
    --root-dir="$d/kubelet" --cert-dir="$d/kubelet/pki" --hostname-override=$NODE --node-ip=$NODE_IP
}

kube_proxy_start() {
  cat >"$NODE_DIR/kube-proxy.yaml" <<T
apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
mode: nftables
bindAddress: $NODE_IP
clusterCIDR: $LAB_NET.0/24
clientConnection: {kubeconfig: $PKI/proxy.conf}
hostnameOverride: $NODE
# A network namespace other than the machine's must not touch these sysctls.
conntrack: {maxPerCore: 0, min: 0, tcpCloseWaitTimeout: 0s, tcpEstablishedTimeout: 0s}
nftables: {minSyncPeriod: 100ms}      # 1 s by default
T
  bg_in_node kube-proxy "$LAB_BIN/kube-proxy" --config="$NODE_DIR/kube-proxy.yaml"
}

# load TAR...: import images into the node.
load() {
  local tar start
  for tar; do
    [ -f "$tar" ] || die "no file $tar"
    alive containerd || die "the lab is not up"
    start=$SECONDS
    with_progress "importing $(basename "$tar")" ctr images import "$tar" >/dev/null || die "importing $tar failed"
    say "imported $(basename "$tar") ($(du -m "$tar" | cut -f1) MB) in $((SECONDS - start)) s"
  done
}

# node_prepare [--no-images]: everything that needs no API server. Importing is slow and waits for the
# disk, so all images but the first go on in the background; node_up waits for them.
node_prepare() {
  local tar tars=()
  node_start
  containerd_start
  load "$LAB_IMAGES/pause.tar"
  [ "${1:-}" != --no-images ] || return 0
  for tar in "$LAB_IMAGES"/*.tar; do [ "$tar" = "$LAB_IMAGES/pause.tar" ] || tars+=("$tar"); done
  load "${tars[@]}" &
  IMPORT=$!
}

node_up() {
  kubelet_start
  kube_proxy_start
  waitfor 60 kubectl get node $NODE || die "$NODE did not register, see $LAB_LOG/kubelet.log"
  kubectl wait --for=condition=Ready node/$NODE --timeout=60s >/dev/null || die "$NODE is not Ready, see $LAB_LOG/kubelet.log"
  say "$NODE Ready"
  [ -z "${IMPORT:-}" ] || wait $IMPORT || die "importing images failed"
}
