# etcd, kube-apiserver, kube-controller-manager, kube-scheduler: processes of the machine itself,
# reached by pods at $LAB_IP.
# shellcheck shell=bash

ETCD_CLIENTS=http://127.0.0.1:12379
ETCD_PEERS=http://127.0.0.1:12380 # not 2379/2380: an etcd of the machine's own may be there

etcd_start() {
  # unsafe-no-fsync: the data is thrown away by `lab down`, so a power cut may eat it.
  bg etcd "$LAB_BIN/etcd" --name lab --data-dir "$LAB_DIR/etcd" --unsafe-no-fsync --log-level warn \
    --listen-client-urls $ETCD_CLIENTS --advertise-client-urls $ETCD_CLIENTS \
    --listen-peer-urls $ETCD_PEERS --initial-advertise-peer-urls $ETCD_PEERS --initial-cluster lab=$ETCD_PEERS
}

apiserver_start() {
  # shellcheck disable=SC2054 # the commas belong to the values
  local args=(
    --etcd-servers=$ETCD_CLIENTS
    --bind-address=$LAB_IP --secure-port=6443 --advertise-address=$LAB_IP
    --tls-cert-file="$PKI/apiserver.crt" --tls-private-key-file="$PKI/apiserver.key" --client-ca-file="$PKI/ca.crt"
    --authorization-mode=Node,RBAC --enable-admission-plugins=NodeRestriction --allow-privileged=true
    --service-account-key-file="$PKI/sa.pub" --service-account-signing-key-file="$PKI/sa.key"
    --service-account-issuer=https://kubernetes.default.svc.cluster.local
    --service-cluster-ip-range=$LAB_SVC.0.0/16
    --kubelet-client-certificate="$PKI/apiserver-kubelet.crt" --kubelet-client-key="$PKI/apiserver-kubelet.key"
    --kubelet-certificate-authority="$PKI/ca.crt" --kubelet-preferred-address-types=InternalIP
    --requestheader-client-ca-file="$PKI/ca.crt" --requestheader-allowed-names=front-proxy-client
    --requestheader-extra-headers-prefix=X-Remote-Extra- --requestheader-group-headers=X-Remote-Group
    --requestheader-username-headers=X-Remote-User
    --proxy-client-cert-file="$PKI/front-proxy.crt" --proxy-client-key-file="$PKI/front-proxy.key"
    # 300 s by default: a test of a lost node would wait that long for its pods to be moved.
    --default-not-ready-toleration-seconds=10 --default-unreachable-toleration-seconds=10
  )
  bg kube-apiserver "$LAB_BIN/kube-apiserver" "${args[@]}"
}

apiserver_ready() {
  curl -fsS --noproxy '*' --cacert "$PKI/ca.crt" --cert "$PKI/admin.crt" --key "$PKI/admin.key" $LAB_API/readyz
}

controller_manager_start() {
  local args=(
    --kubeconfig="$PKI/controller-manager.conf" --bind-address=127.0.0.1
    --service-account-private-key-file="$PKI/sa.key" --root-ca-file="$PKI/ca.crt" --use-service-account-credentials
    --leader-elect=false # one copy: no 15 s of waiting for a lease
    # The defaults (20/30) are what a test with many objects would measure.
    --kube-api-qps=200 --kube-api-burst=400
    # 5 s and 40 s by default: how soon a dead node is noticed.
    --node-monitor-period=2s --node-monitor-grace-period=12s
  )
  bg kube-controller-manager "$LAB_BIN/kube-controller-manager" "${args[@]}"
}

scheduler_start() {
  bg kube-scheduler "$LAB_BIN/kube-scheduler" --kubeconfig="$PKI/scheduler.conf" --bind-address=127.0.0.1 \
    --leader-elect=false --kube-api-qps=200 --kube-api-burst=400
}

control_plane_up() {
  etcd_start
  apiserver_start
  waitfor 90 apiserver_ready || die "the API server is not ready, see $LAB_LOG/kube-apiserver.log"
  say "API server ready"
  controller_manager_start
  scheduler_start
  kubectl apply -f "$LAB_HOME/manifests/rbac.yaml" >/dev/null
}
