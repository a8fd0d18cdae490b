"""Functions of other languages, PromQL above all, and what says the same here."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

#: An expression of this language for each name.
INSTEAD: Mapping[str, str] = MappingProxyType(
    {
        "avg": "mean(loss[200])",
        "average": "mean(loss[200])",
        "avg_over_time": "mean(loss[200])",
        "sum": "mean(loss[200]) * 200",
        "sum_over_time": "mean(loss[200]) * 200",
        "min_over_time": "min(loss[200])",
        "max_over_time": "max(loss[200])",
        "std": "stddev(loss[200])",
        "stddev_over_time": "stddev(loss[200])",
        "var": "stddev(loss[200]) ^ 2",
        "stdvar": "stddev(loss[200]) ^ 2",
        "stdvar_over_time": "stddev(loss[200]) ^ 2",
        "mad_over_time": "mad(loss[200])",
        "quantile_over_time": "quantile(loss[200], q=0.99)",
        "histogram_quantile": "quantile(loss[200], q=0.99)",
        "percentile": "quantile(loss[200], q=0.99)",
        "count_over_time": "count((loss > 5)[200])",
        "rate": "slope(loss[200])",
        "irate": "delta(loss[2])",
        "idelta": "delta(loss[2])",
        "increase": "delta(loss[200])",
        "deriv": "slope(loss[200])",
        "predict_linear": "loss + 1000 * slope(loss[200])",
        "ewma": "ema(loss, beta=0.98)",
        "holt_winters": "ema(loss, beta=0.98)",
        "double_exponential_smoothing": "ema(loss, beta=0.98)",
        "resets": "changes(loss[200])",
        "absent_over_time": "absent(loss)",
        "last_over_time": "loss",
    }
)
