# Network: a bridge on the machine, a network namespace for the node.
#
#   10.244.0.0/26     LAN on the bridge: .1 the machine (API server, DNS), .2 node1, .3-.62 free
#   10.244.0.64/26    free (pods of a second node)
#   10.244.0.128/25   pods of node1
#   10.96.0.0/16      ClusterIPs, reached through node1 (its kube-proxy rewrites them)
#
# The node has a namespace of its own rather than the machine's, because then nothing can leave:
# its only route goes to the LAN, and no table, sysctl or route of the machine changes except the
# three routes that vanish with the bridge. Kill the node's processes and its side is gone.
# shellcheck shell=bash

network_up() {
  local other
  other=$(ip -o -4 addr show to $LAB_NET.0/24)
  [ -z "$other" ] || die "$LAB_NET.0/24 is already used on this machine: $other"
  ip link add $LAB_BRIDGE type bridge
  ip addr add $LAB_IP/26 dev $LAB_BRIDGE
  ip link set $LAB_BRIDGE up
  # Both through the node; with the machine's default route ClusterIPs would leave the machine.
  # onlink: the node itself comes later.
  ip route add $NODE_PODS via $NODE_IP dev $LAB_BRIDGE onlink src $LAB_IP
  ip route add $LAB_SVC.0.0/16 via $NODE_IP dev $LAB_BRIDGE onlink src $LAB_IP
}

# node_network PID: connects the network namespace of that process to the bridge.
node_network() {
  ip link add coda-lab1 type veth peer name eth0 netns "$1"
  ip link set coda-lab1 master $LAB_BRIDGE up
  # No default route. nsenter, not `ip netns exec`: that one remounts /sys and would hide the cgroups.
  nsenter --target "$1" --net sh -euc "
    ip link set lo up
    ip addr add $NODE_IP/26 dev eth0
    ip link set eth0 up
    # ClusterIPs need some route before kube-proxy rewrites them; one that no Service has ends here, unanswered.
    ip route add $LAB_SVC.0.0/16 dev eth0
    sysctl -qw net.ipv4.ip_forward=1
  "
}

network_down() {
  local link
  for link in coda-lab1 $LAB_BRIDGE; do ip link del $link 2>/dev/null || true; done
}
