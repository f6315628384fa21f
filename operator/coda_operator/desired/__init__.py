"""What should exist for a CodaCluster: one pure builder for each kind of child."""
