"""Pictures of the recorded tables: python -m benchmarks.plots [FOLDER]

Every number in them is a cell of a table in benchmarks/README.md or of a file in benchmarks/records, and each says
which run gave it. A file `traffic-NAME.jsonl` there gets a picture of its own.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from benchmarks.recorded import RECORDS, Table, recorded

FOLDER: Final = Path(__file__).with_name("plots")
MLXD, OTHER, BARE = "#2463b0", "#c9722b", "#8a8f98"
COLOURS: Final = {
    "bare": BARE, "mlxd": MLXD, "mlxd-off": "#9dbde6", "mlx_lm.server": OTHER, "mlx_lm": OTHER, "vllm-mlx": "#4c8f4c",
    "mlx-vlm": "#8c5aa8",
}  # fmt: skip
INK: Final = "#24292f"
GRID: Final = "#d8dce1"
SIZE: Final = (8.0, 4.2)


def compare(axes: Any, run: Table) -> None:
    """Draw tokens per second over HTTP ÷ those of the bare loop, by the number of clients."""
    clients = list(dict.fromkeys(row[0] for row in run.rows))
    at = run.head.index("÷ bare")
    engines = ("mlxd", "mlx_lm.server")
    for place, engine in enumerate(engines):
        values = [next(float(row[at]) for row in run.rows if row[:2] == [count, engine]) for count in clients]
        places = [index + (place - 0.5) * 0.38 for index in range(len(clients))]
        bars = axes.bar(places, values, 0.34, color=COLOURS[engine], label=engine)
        axes.bar_label(bars, fmt="%g", padding=-14, fontsize=9, color="white")
    _line_of_one(axes, "bare loop of mlx-lm = 1")
    axes.set_xticks(range(len(clients)), clients)
    axes.set_xlabel("clients at once")
    axes.legend(loc="upper left", ncols=2, framealpha=1)


def stall(axes: Any, run: Table) -> None:
    """Draw the slowest 1 % of gaps between tokens of running streams while a long prompt is processed."""
    # The fourth number is p99 during the long prompt. Of several runs of an engine the newest is drawn.
    newest = {row[0].split(",")[0] if row[0].startswith("mlxd") else row[0]: float(row[4]) for row in run.rows}
    names = list(newest)[::-1]
    colours = [COLOURS[name.split(",")[0]] for name in names]
    _label(axes, axes.barh(names, [newest[name] for name in names], 0.6, color=colours), "%g ms")
    axes.set_xscale("log")
    axes.set_xlim(10, max(newest.values()) * 3)
    axes.set_xlabel("p99 between two tokens, ms (logarithmic)")


def prefix(axes: Any, run: Table) -> None:
    """Draw the time to first token of a prompt that is new, in memory, on disk and after a restart."""
    kinds = (("cold", BARE), ("memory", MLXD), ("disk", "#5b8fd0"), ("restart", "#9dbde6"))
    rows = [row for row in run.rows if row[0] == "mlxd"]
    for place, (kind, colour) in enumerate(kinds):
        values = [float(row[run.head.index(kind)]) for row in rows]
        places = [index + (place - 1.5) * 0.21 for index in range(len(rows))]
        _label(axes, axes.bar(places, values, 0.19, color=colour, label=kind), "%g s", 8)
    axes.set_xticks(range(len(rows)), [f"{row[1]} tokens" for row in rows])
    axes.set_yscale("log")
    axes.set_ylim(0.03, 1000)
    axes.set_ylabel("seconds (logarithmic)")
    axes.legend(loc="upper left", framealpha=1)


def stall_bodies(axes: Any, run: Table) -> None:
    """Draw the longest stall of the event loop while a body arrived, the lower of two runs."""
    at = run.head.index("stall, least")
    rows = sorted(run.rows, key=lambda row: float(row[at]))
    bars = axes.barh([f"{row[0]}, {row[1]} MiB" for row in rows], [float(row[at]) for row in rows], 0.7, color=MLXD)
    _label(axes, bars, "%g ms", 8)
    axes.tick_params(axis="y", labelsize=8)
    axes.set_xlabel("ms, with others' load in them")


def constrain(axes: Any, run: Table) -> None:
    """Draw the throughput of free rows beside a constrained row ÷ beside another free row."""
    rows = [row for row in run.rows if row[1] == "+ a constrained row"]
    bars = axes.bar([row[0] for row in rows], [float(row[3]) for row in rows], 0.5, color=MLXD)
    axes.bar_label(bars, fmt="%g", padding=-14, fontsize=9, color="white")
    _line_of_one(axes, "a free row beside them = 1")
    axes.set_xlabel("free rows in the batch")


def traffic(axes: Any, run: Table) -> None:
    """Draw tokens per second by list of requests and number of clients in a closed loop."""
    rows = [row for row in run.rows if row[1].isdigit()]
    loads = sorted({(row[0], int(row[1])) for row in rows})
    engines = [name for name in COLOURS if any(row[2] == name for row in rows)]
    width = 0.84 / len(engines)
    for place, engine in enumerate(engines):
        speeds = {(row[0], int(row[1])): float(row[3]) for row in rows if row[2] == engine}
        places = [loads.index(load) + (place - (len(engines) - 1) / 2) * width for load in speeds]
        bars = axes.bar(places, list(speeds.values()), width * 0.92, color=COLOURS[engine], label=engine)
        axes.bar_label(bars, fmt="%g", padding=2, fontsize=7, rotation=90, color=INK)
    axes.margins(y=0.18)
    axes.set_xticks(range(len(loads)), [f"{name}, {count}" for name, count in loads])
    axes.set_xlabel("requests, and clients at once")
    axes.set_ylabel("tok/s, unequal lengths")
    axes.legend(loc="upper left", ncols=2, framealpha=1)


# Each entry: name of a picture and its benchmark, its title, its drawing function, and the height of the drawing.
PLOTS: Final[dict[str, tuple[str, Callable[[Any, Table], None], float]]] = {
    "compare": ("Serving over HTTP ÷ the bare loop", compare, 4.2),
    "stall": ("A long prompt beside running streams", stall, 3.0),
    "prefix": ("Time to first token of a known prompt (mlxd)", prefix, 4.2),
    "stall_bodies": ("Large bodies of every kind", stall_bodies, 6.4),
    "constrain": ("Rows beside a grammar", constrain, 3.6),
    "traffic": ("Requests of unequal lengths", traffic, 4.2),
}


def pictures() -> list[str]:
    """Return the names of all pictures: one for each benchmark, and one for each other file of records."""
    return [*PLOTS, *sorted(path.stem for path in RECORDS.glob("*-*.jsonl"))]


def draw(name: str, folder: Path) -> Path:
    """Draw one picture into a folder. The same table gives the same file."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    title, plot, height = PLOTS[name.partition("-")[0]]
    run = recorded(name)
    style = {
        "svg.fonttype": "none", "svg.hashsalt": name, "font.family": "sans-serif", "text.color": INK,
        "axes.labelcolor": INK, "axes.edgecolor": GRID, "xtick.color": INK, "ytick.color": INK,
        "axes.spines.top": False, "axes.spines.right": False,
    }  # fmt: skip
    with matplotlib.rc_context(style):
        figure, axes = pyplot.subplots(figsize=(SIZE[0], height), layout="constrained")
        plot(axes, run)
        axes.grid(axis="x" if name.startswith("stall") else "y", color=GRID, linewidth=0.6)
        axes.set_axisbelow(True)
        figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
        figure.supxlabel(f"{run.command}   ({run.subject})", x=0.01, ha="left", fontsize=8, color=BARE)
        path = folder / f"{name}.svg"
        figure.savefig(path, metadata={"Date": None, "Title": title, "Description": run.command})
        pyplot.close(figure)
    # matplotlib ends lines with a space.
    path.write_text("".join(f"{line.rstrip()}\n" for line in path.read_text().splitlines()))
    return path


def _label(axes: Any, bars: Any, form: str, size: int = 9) -> None:
    axes.bar_label(bars, fmt=form, padding=2, fontsize=size, color=INK)


def _line_of_one(axes: Any, text: str) -> None:
    axes.axhline(1, color=BARE, linestyle="--", linewidth=1)
    axes.text(1, 1.02, text, color=INK, ha="right", fontsize=9, transform=axes.get_yaxis_transform())
    axes.set_ylim(0, 1.3)


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in pictures():
        print(draw(name, folder))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if sys.argv[1:] else FOLDER)
