# Cluster DNS: CoreDNS as a process of the machine, behind the usual kube-dns Service.
# shellcheck shell=bash

dns_up() {
  # TTL and cache of 1 s: tests see a changed headless Service at once. No forward plugin: nothing
  # outside the cluster is asked.
  cat >"$LAB_DIR/Corefile" <<T
.:53 {
  bind $LAB_IP
  errors
  health $LAB_IP:8053
  kubernetes cluster.local in-addr.arpa {
    kubeconfig $PKI/coredns.conf
    pods verified
    ttl 1
  }
  cache 1
}
T
  sed "s/@SVC@/$LAB_SVC/; s/@IP@/$LAB_IP/" "$LAB_HOME/manifests/dns.yaml" | kubectl apply -f - >/dev/null
  bg coredns "$LAB_BIN/coredns" -conf "$LAB_DIR/Corefile"
  waitfor 20 curl -fsS --noproxy '*' http://$LAB_IP:8053/health || die "CoreDNS does not answer, see $LAB_LOG/coredns.log"
  say "DNS up ($LAB_SVC.0.10)"
}
