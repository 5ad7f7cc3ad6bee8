"""A calibration report as text and as a plot."""

from pathlib import Path
from typing import Any

from gdp.costs.calibrate import Report
from gdp.errors import MissingExtraError
from gdp.files.writing import atomic
from gdp.terminal import printable_lines
from gdp.version import install_command


def report_text(report: Report) -> str:
    """The figures of a report as aligned tables."""
    found = report.summary()
    if not report.models:
        return f"fitted to {report.train_models} models; {report.note}"
    lines = [
        f"fitted to {found['train_models']} models of {found['train_families']} families; held out "
        f"{len(report.models)} models of {len(report.held_families)} families: "
        f"{', '.join(report.held_families)}",
        "",
        f"{'kernels, weighted by time':28} {'share':>6} {'count':>6} {'median':>8} {'p90':>8}"
        f" {'roofline':>9} {'p90':>8}",
        _kernel_line("all", 1.0, found["kernel_error"]),
    ]
    lines += [
        _kernel_line(name, figures["time_share"], figures)
        for name, figures in found["by_type"].items()
    ]
    lines += [
        "",
        f"{'whole models':28} {'measured':>10} {'predicted':>10} {'error':>8} {'roofline':>9}",
    ]
    lines += [
        f"{m['model']:28} {m['measured_s'] * 1e3:7.2f} ms {m['predicted_s'] * 1e3:7.2f} ms "
        f"{m['error']:+8.1%} {m['roofline_error']:+9.1%}"
        for m in found["models"]
    ]
    for name, figures in found["model_error"].items():
        lines.append(
            f"{name}: mean error {figures['mean']:.1%}, median {figures['median']:.1%}, "
            f"within 10%: {figures['within_10_percent']:.0%}, worst {figures['worst']:.1%}, "
            f"bias {figures['bias']:+.1%}"
        )
    return printable_lines(lines)


def _kernel_line(name: str, share: float, figures: dict[str, Any]) -> str:
    ours, plain = figures["learned"], figures["roofline"]
    return (
        f"{name:28} {share:6.1%} {figures['kernels']:6} {ours['median']:8.1%} {ours['p90']:8.1%} "
        f"{plain['median']:9.1%} {plain['p90']:8.1%}"
    )


def write_plot(report: Report, path: Path) -> None:
    """Predicted against measured seconds on logarithmic axes, kernels and whole models."""
    try:
        import matplotlib
    except ImportError:
        raise MissingExtraError(f"a plot needs matplotlib: {install_command('plots')}") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 5.2))
    for axis, rows, title in (
        (axes[0], report.kernels, "kernels of held-out families"),
        (axes[1], report.models, "whole held-out models"),
    ):
        measured = [row.measured_s * 1e3 for row in rows]
        axis.loglog(measured, [r.roofline_s * 1e3 for r in rows], ".", color="0.7", ms=4,
                    label="roofline")  # fmt: skip
        axis.loglog(measured, [r.predicted_s * 1e3 for r in rows], ".", color="C0", ms=4,
                    label="learned")  # fmt: skip
        ends = [min(measured, default=1.0), max(measured, default=1.0)]
        axis.loglog(ends, ends, "k-", lw=0.8)
        for factor in (0.9, 1.1):
            axis.loglog(ends, [e * factor for e in ends], "k:", lw=0.8)
        axis.set(xlabel="measured, ms", ylabel="predicted, ms", title=title)
        axis.legend()
    figure.tight_layout()
    # `gdp.files.writing` knows gdp's plots by the software named in them.
    with atomic(path) as file:
        figure.savefig(file, dpi=80, format="png", metadata={"Software": "gdp"})
    pyplot.close(figure)
