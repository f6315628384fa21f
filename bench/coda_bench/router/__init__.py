"""The router's cost: added latency, CPU and memory, side by side with direct requests and with peers."""
