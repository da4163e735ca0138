"""The page of a performance report. Run by `trinity perf view`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import streamlit as st

from trinity.perf.report import read_report

_ENGINE_CHARTS = {
    "Requests that run": "running",
    "Requests that wait": "waiting",
    "KV cache, MB": "kv_cache_mb",
}
_MACHINE_CHARTS = {
    "Processors of the machine, %": "cpu_percent",
    "Processors of the run, cores": "run_cpu_cores",
    "Memory of the run, MB": "run_memory_mb",
    "Memory of the machine, MB": "machine_memory_mb",
}
_GPU_CHARTS = {"GPUs, %": "utilization_percent", "Memory of GPUs, MB": "memory_mb"}

Rows = list[dict[str, Any]]


class PerfPage:
    """The page of one report.

    Args:
        path: File of the report.
    """

    def __init__(self, path: str) -> None:
        self.report: dict[str, Any] = read_report(Path(path))

    def main(self) -> None:
        """Draw the page."""
        report, meta = self.report, self.report["run_meta"]
        st.set_page_config(page_title="trinity perf view", layout="wide")
        st.title(f"{meta['project']}/{meta['name']}: {meta['module']}")
        if report["status"]["state"] != "finished":
            st.error(f"{report['status']['state']}: {report['status']['error'] or 'by hand'}")
        self._figures()
        self._steps()
        samples = report["resource_timeline"]
        st.header("Engines")
        _charts(_by_part(samples, "engines", "engine"), _ENGINE_CHARTS)
        st.header("Machine")
        _charts([{"seconds": s["seconds"], "part": "all", **s} for s in samples], _MACHINE_CHARTS)
        _charts(_by_part(samples, "gpus", "GPU"), _GPU_CHARTS)
        st.header("The run")
        st.json({"run": meta, "artifacts": report["artifacts"]}, expanded=False)

    def _figures(self) -> None:
        rates, timing = self.report["throughput"], self.report["timing"]
        figures = {
            "Tokens a second": rates["tokens_per_second"],
            "Samples a second": rates["samples_per_second"],
            "Seconds a step": timing["step_s_mean"],
            "Seconds to start": timing["start_s"],
            "Tokens of a prompt": rates["prompt_length"]["mean"],
            "Tokens of a reply": rates["response_length"]["mean"],
        }
        for column, (label, value) in zip(st.columns(len(figures)), figures.items(), strict=True):
            column.metric(label, "none" if value is None else f"{value:,.4g}")
        later = rates["tokens_per_second_later"]
        if later is not None:
            st.caption(f"{later:,.4g} tokens a second without the first step")
        failures = self.report["failures"]
        told = [f"{count} {name.replace('_', ' ')}" for name, count in failures.items() if count]
        if told and not failures["engines"]:
            st.warning("Failed: " + ", ".join(told))
        for failure in failures["engines"]:
            st.warning(f"Engine {failure['engine']}, {failure['seconds']} s: {failure['error']}")

    def _steps(self) -> None:
        st.header("Steps")
        if self.report["step_metrics"]:
            st.dataframe(self.report["step_metrics"], hide_index=True)
        else:
            st.info("No step came to its end.")


def _by_part(samples: Rows, name: str, label: str) -> Rows:
    """One row for each engine or GPU of each sample."""
    return [
        {"seconds": sample["seconds"], "part": f"{label} {index}", **figures}
        for sample in samples
        for index, figures in enumerate(sample[name])
    ]


def _charts(rows: Rows, charts: dict[str, str]) -> None:
    """A line for each part over the run's seconds, of each figure that was taken."""
    for title, name in charts.items():
        points = [
            {key: row[key] for key in ("seconds", "part", name)} for row in rows if name in row
        ]
        if points:
            st.subheader(title)
        if points and not any(point[name] for point in points):
            st.caption("0 all the time")  # a chart of it has one line, at 0.000000
        elif points:
            color = "part" if len({point["part"] for point in points}) > 1 else None
            label = "seconds since the start"
            st.line_chart(points, x="seconds", y=name, color=color, x_label=label, y_label="")


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw the page of the report that the command line names."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--report", required=True)
    PerfPage(parser.parse_args(arguments).report).main()


if __name__ == "__main__":
    main()
