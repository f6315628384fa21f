"""``coda demo``: the whole stack on this machine, two small coding agents, and every decision explained."""
