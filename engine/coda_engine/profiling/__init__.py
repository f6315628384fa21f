"""Measure, fit, check and write profiles of an engine (paper Appendix A)."""
