"""The report page: a profile as one self-contained HTML file with its plots."""

from coda_engine.profiling.report.page import report_page

__all__ = ["report_page"]
