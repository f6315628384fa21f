"""``coda up``: one machine, one YAML file, the operator's own process builders, and a supervisor.

``cluster_file`` reads, ``machine`` looks, ``preflight`` decides, ``layout`` turns the specification into processes,
``stack`` runs them; ``leftovers`` and ``guardian`` see to it that nothing stays behind, whatever dies.
"""
