"""Pure decisions: frozen values with one method each, used by the engine, its tests and, later, the simulator.

Observations in, decision with its reason out. No clock (it is an argument), no I/O, no vLLM.
"""
