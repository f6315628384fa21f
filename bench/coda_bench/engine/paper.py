"""What the paper reports for its own hardware, printed beside what was measured here.

*Coda: Exploiting Admission Flexibility for Coding-Agent Serving*, section 7: Qwen3-Coder-30B-A3B-FP8 on A100 GPUs,
traces M1-M3 on one GPU and Q1-Q3 on four. Its SLO is not given, so only the direction of SLO figures compares.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from coda_bench.report import Row


@dataclass(frozen=True, slots=True)
class Claim:
    """One published comparison.

    Attributes:
        cases: Cases of this benchmark that ask the same question.
        metric: As rows name it.
        systems: The systems here that stand for the paper's: its exact rules, and our default.
        ratio_to: What it is compared with there.
        ratio: Published ratio or range of ratios, in words.
        where: Where it was measured.
    """

    cases: tuple[str, ...]
    metric: str
    systems: tuple[str, ...]
    ratio_to: str
    ratio: str
    where: str


_SINGLE = ("m3", "m3-tight", "m3-2.7x", "m1")
_OURS = ("coda", "tiered-aging")
_ONE_GPU = "Fig. 15, one A100, M1-M3"

CLAIMS = (
    Claim(_SINGLE, "output_tps", _OURS, "fifo", "1.125-1.352", _ONE_GPU),
    Claim(_SINGLE, "slo_tps", _OURS, "fifo", "2.044-2.907", _ONE_GPU),
    Claim(_SINGLE, "output_tps", _OURS, "cachewise", "1.031-1.143", _ONE_GPU),
    Claim(_SINGLE, "slo_tps", _OURS, "cachewise", "1.088-2.047", _ONE_GPU),
    Claim(_SINGLE, "e2e_p50", _OURS, "fifo", "0.444-0.551", _ONE_GPU),
    Claim(_SINGLE, "e2e_p95", _OURS, "fifo", "0.798-0.940", _ONE_GPU),
    Claim(_SINGLE, "e2e_p50", _OURS, "cachewise", "0.962 (mean)", _ONE_GPU),
    Claim(_SINGLE, "e2e_p95", _OURS, "cachewise", "0.976 (mean)", _ONE_GPU),
    Claim(("ablation", "m3"), "output_tps", ("tiered-aging",), "cachewise", "1.069 (mean; M3 1.118)", "Table 1, M1-M3"),
    Claim(("ablation", "m3"), "useful_tps", ("tiered-aging",), "cachewise", "1.010 (mean; M3 1.022)", "Table 1, M1-M3"),
    Claim(("ablation", "m3"), "slo_tps", ("tiered-aging",), "cachewise", "1.366 (mean; M3 1.861)", "Table 1, M1-M3"),
    Claim(("fleet2",), "output_tps", ("coda/coda",), "coda/fifo", "1.037-1.208", "Fig. 14, four A100, Q1-Q3"),
    Claim(("fleet2",), "slo_tps", ("coda/coda",), "coda/fifo", "1.121-1.173", "Fig. 14, four A100, Q1-Q3"),
    Claim(("fleet2",), "output_tps", ("coda/coda",), "smetric/coda", "1.027-1.101", "Fig. 14, four A100, Q1-Q3"),
    Claim(("fleet2",), "slo_tps", ("coda/coda",), "smetric/coda", "1.082-1.357", "Fig. 14, four A100, Q1-Q3"),
    Claim(("fleet2",), "output_tps", ("coda/coda",), "smetric/fifo", "1.042-1.332", "Fig. 14, four A100, Q1-Q3"),
    Claim(("fleet2",), "slo_tps", ("coda/coda",), "smetric/fifo", "1.158-1.803", "Fig. 14, four A100, Q1-Q3"),
    Claim(("fleet2",), "output_tps", ("coda/coda",), "round-robin/fifo", "up to 1.569", "7.2, against vLLM, Q1-Q3"),
    Claim(("fleet2",), "slo_tps", ("coda/coda",), "round-robin/fifo", "up to 1.703", "7.2, against vLLM, Q1-Q3"),
)


def beside(rows: Sequence[Row]) -> list[str]:
    """Return a line for each published comparison that ``rows`` repeat; none when there is no such row."""
    lines = []
    for row in rows:
        for claim in CLAIMS:
            same = (row.metric, row.ratio_to) == (claim.metric, claim.ratio_to) and row.system in claim.systems
            if same and row.case in claim.cases and row.ratio is not None:
                lines.append(
                    f"{row.case} {row.metric}: {row.system} / {row.ratio_to} here {row.ratio:.3f} "
                    f"({row.ratio_low:.2f}-{row.ratio_high:.2f}); paper {claim.ratio} [{claim.where}]"
                )
    return lines
