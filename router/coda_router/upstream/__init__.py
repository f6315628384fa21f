"""The data path to workers: an own HTTP/1.1 client, because per-request cost is the router's cost."""
