# Test PKI: one CA, server and client certificates, kubeconfigs written by hand (`kubectl config`
# would need 4 calls of 0.2 s for each user). EC keys: all of it takes less than a second.
# shellcheck shell=bash

make_key() { openssl ecparam -name prime256v1 -genkey -noout -out "$1" 2>/dev/null; }

# make_cert NAME SUBJECT USAGE [SUBJECT-ALT-NAMES]: $PKI/NAME.{key,crt}.
make_cert() {
  local name=$1 extensions="extendedKeyUsage=$3"
  [ -z "${4:-}" ] || extensions+=$'\n'"subjectAltName=$4"
  make_key "$PKI/$name.key"
  openssl req -new -key "$PKI/$name.key" -subj "$2" |
    openssl x509 -req -CA "$PKI/ca.crt" -CAkey "$PKI/ca.key" -CAcreateserial -days 3650 \
      -extfile <(echo "$extensions") -out "$PKI/$name.crt" 2>/dev/null
}

# make_kubeconfig NAME: for the user of the certificate NAME.
make_kubeconfig() {
  cat >"$PKI/$1.conf" <<Y
apiVersion: v1
kind: Config
current-context: coda-lab
contexts: [{name: coda-lab, context: {cluster: coda-lab, user: $1}}]
clusters: [{name: coda-lab, cluster: {server: "$LAB_API", certificate-authority-data: $(base64 -w0 "$PKI/ca.crt")}}]
users: [{name: $1, user: {client-certificate-data: $(base64 -w0 "$PKI/$1.crt"), client-key-data: $(base64 -w0 "$PKI/$1.key")}}]
Y
}

make_user() { # name subject
  make_cert "$1" "$2" clientAuth
  make_kubeconfig "$1"
}

pki() {
  mkdir -m 700 "$PKI"
  make_key "$PKI/ca.key"
  openssl req -x509 -key "$PKI/ca.key" -days 3650 -subj /CN=coda-lab-ca -out "$PKI/ca.crt"
  local svc=kubernetes.default.svc
  make_cert apiserver /CN=kube-apiserver serverAuth \
    "IP:127.0.0.1,IP:$LAB_IP,IP:$LAB_SVC.0.1,DNS:localhost,DNS:kubernetes,DNS:kubernetes.default,DNS:$svc,DNS:$svc.cluster.local"
  make_cert apiserver-kubelet /O=system:masters/CN=kube-apiserver-kubelet-client clientAuth
  # Of the aggregation layer, for add-ons that serve an API (metrics-server).
  make_cert front-proxy /CN=front-proxy-client clientAuth
  make_user admin /O=system:masters/CN=admin
  make_user controller-manager /CN=system:kube-controller-manager
  make_user scheduler /CN=system:kube-scheduler
  make_user proxy /CN=system:kube-proxy
  make_user coredns /CN=system:coredns
  make_cert $NODE "/O=system:nodes/CN=system:node:$NODE" serverAuth,clientAuth "IP:$NODE_IP,DNS:$NODE"
  make_kubeconfig $NODE
  # Signs service account tokens.
  make_key "$PKI/sa.key"
  openssl ec -in "$PKI/sa.key" -pubout -out "$PKI/sa.pub" 2>/dev/null
}
