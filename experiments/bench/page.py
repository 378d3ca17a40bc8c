"""The figures as a Markdown page: one table for each benchmark, one configuration a line."""

from collections.abc import Mapping, Sequence
from typing import Any

from experiments.pages import provenance

Row = Mapping[str, Any]
Columns = Sequence[tuple[str, str]]  # key, heading

RECORD: Columns = (
    ("workload", "workload"), ("configuration", "configuration"), ("settings", "settings"), ("rows", "rows each"), ("dims", "dims"),
    ("ratio", "ratio"), ("cpu_ratio", "CPU ratio"), ("one_off_s", "learning, s"), ("steps", "N"),
    ("run_ratio", "ratio of N steps"), ("run_cpu_ratio", "its CPU ratio"), ("plain_ms_per_step", "plain, ms a step"),
    ("bytes_per_occurrence", "bytes per occurrence"), ("compress_s", "compressing, s"), ("embedding_s", "embedding, s"),
    ("embedded", "of occurrences"), ("jointly", "jointly"), ("fidelity", "fidelity, GPT study"),
)  # fmt: skip
PLANS: Columns = (
    ("workload", "workload"), ("planned_ratio", "planned ratio"), ("ratio", "found"), ("ratio_off", "off by"),
    ("planned_run_ratio", "planned, of N steps"), ("run_ratio", "found"), ("run_ratio_off", "off by"),
    ("planned_bytes", "planned bytes per occurrence"), ("bytes_per_occurrence", "found"), ("bytes_off", "off by"),
)  # fmt: skip
MEMORY: Columns = (
    ("p", "p"), ("rows_per_step", "rows a step"), ("steps", "steps"), ("samples_per_s", "samples/s"),
    ("share_of_peak", "share of peak"), ("against_literal", "× Algorithm 1"), ("damped_share_of_peak", "damped: share"),
    ("damped_against_literal", "damped: × Algorithm 1"), ("peak_gflops", "peak, GFLOP/s"),
)  # fmt: skip
DISK: Columns = (
    ("run", "steps taken as"), ("per_layer", "per layer"), ("layers", "layers"), ("dims", "dims"), ("rows", "occurrences"),
    ("seconds", "s"), ("cpu_s", "CPU s"), ("share_of_peak", "share of peak"), ("read_s", "without writing, s"),
    ("read_share_of_peak", "its share of peak"), ("skipped", "left out because"),
)  # fmt: skip
SLOPES: Columns = (
    ("against", "against"), ("value", "value"), ("seconds", "s"), ("cpu_s", "CPU s"), ("exponent", "exponent"),
    ("peak_bytes", "highest memory, bytes"),
)  # fmt: skip
QUERY: Columns = (
    ("workload", "workload"), ("configuration", "configuration"), ("settings", "settings"), ("occurrences", "occurrences"), ("queries", "queries"),
    ("dims", "dims"), ("index_s", "index, s"), ("index_cpu_s", "its CPU s"),
    ("embeddings_s", "by embeddings, s"), ("embeddings_cpu_s", "their CPU s"), ("query_over_passes", "over their own passes"), ("index_and_query_s", "both, s"),
    ("adjoint_s", "by adjoint, no index, s"), ("adjoint_cpu_s", "its CPU s"),
)  # fmt: skip
STORE: Columns = (
    ("configuration", "configuration"), ("settings", "settings"), ("rows", "rows each"), ("dims", "dims"),
    ("bytes_per_occurrence", "bytes per occurrence"), ("times_smaller", "times smaller"), ("other_bytes", "fixed bytes"),
)  # fmt: skip
EFFICIENCY: Columns = (
    ("method", "method"), ("stage", "stage"), ("storage_bytes", "storage, bytes"), ("peak_bytes", "highest memory, bytes"),
    ("samples_per_s", "samples/s"), ("work_s", "s"), ("work_cpu_s", "CPU s"),
)  # fmt: skip
PEERS: Columns = (
    ("workload", "workload"), ("rival", "rival"), ("version", "version"), ("configuration", "configuration"),
    ("dims", "dims"), ("plain_s", "plain epoch, s"), ("record_over_plain", "recording / plain"),
    ("one_off_s", "learning, s"), ("index_s", "index, s"), ("index_cpu_s", "its CPU s"),
    ("index_over_plain", "index / plain"), ("query_s", "queries, s"), ("query_cpu_s", "their CPU s"), ("query_over_passes", "over their own passes"),
    ("adjoint_s", "by adjoint, no index, s"), ("adjoint_cpu_s", "its CPU s"),
    ("store_bytes", "store, bytes"), ("kept", "kept"), ("failed", "no figures because"),
)  # fmt: skip
EXACT: Columns = (
    ("model", "model"), ("steps", "steps"), ("training_s", "a training, CPU s"), ("reverse 1", "reverse, 1 query"),
    ("reverse 4", "4 queries"), ("reverse 16", "16 queries"), ("leave_out 8", "8 sources left out"),
    ("tangent 8", "tangents of 8 parts"), ("memory", "memory"), ("load", "load"),
)  # fmt: skip
SERVE: Columns = (
    ("occurrences", "occurrences"), ("dims", "dims"), ("start_s", "start, s"), ("starts", "starts"),
    ("cold_median_s", "cold, s"), ("cold_p95_s", "cold p95, s"), ("questions", "questions"), ("warm_median_s", "warm, s"),
    ("warm_p95_s", "warm p95, s"), ("clients", "clients"), ("seconds", "for s"), ("answers", "answers"), ("answers_per_s", "answers/s"),
    ("crowd_median_s", "with them, s"), ("crowd_p95_s", "p95, s"), ("errors", "errors"), ("bytes", "memory, bytes"),
    ("memory_growth", "memory growth"),
)  # fmt: skip

WORDS = {
    "record": "`ratio`: recorded over plain training time, disk included, median of the turns after the warm-up. "
    "`learning`: extra seconds of the warm-up compared with steady recording, once per run. `ratio of N "
    "steps`: the whole run with both. `fidelity`: Spearman correlation with retraining of the same "
    "configuration in `python -m experiments gpt --mode finetune` (another, smaller GPT). The second table: "
    "what `backstory plan` predicted for the default, from its own short trial in the same run, in CPU time.",
    "embed": "`share of peak`: 4 p² operations for each row (8 p² with momentum), relative to the speed of a 2048 × "
    "2048 float32 product in the same run. From disk it includes reading and writing (`without writing`: "
    "only reading), and is left blank where a run has at most p/2 rows, whose embedding takes far fewer "
    "operations. `× Algorithm 1`: how many times as fast as the paper's pseudocode, transcribed line by "
    "line. `damped`: the implicit form at every step. `exponent`: k of seconds ∝ valueᵏ since the line "
    "before.",
    "query": "All samples of one epoch scored on all queries, recording excluded, query gradients included. "
    "`over their own passes`: CPU time over that of one forward and backward pass of the queries.",
    "store": "`times smaller`: than float16 × 1,024 random dimensions per layer with the same curvature setting. "
    "Bytes: rows and steps on disk; fixed bytes (the projection) do not grow with the run. The second table "
    "has the form of the paper's efficiency table. The paper reports, on an A100 with Pythia-410M, LoGRA 170 "
    "GB, 63.6 GB, 41.6 samples/s and data value embeddings 171 GB, 64.6 / 0.84 GB, 667.5 samples/s, "
    "influence 640 samples/s for both.",
    "peers": "Each other library runs in its own environment and process, with one thread. `plain`: one epoch without "
    "it in the same process. `recording / plain`: training with the library in the loop. `index`: what it "
    "does after training.",
    "serve": "From typed text to ranked result over HTTP, one thread per query. `cold`: the first query after a "
    "start, median of the starts. `warm`: queries one after the other. `with them`: all clients at once, "
    "each sending its next query as soon as it has a result. `memory growth`: from the first tenth of that "
    "time to its end.",
    "exact": "CPU time of exact results in multiples of a plain training's, the replay included, float32: medians of the repeats, each divided "
    "by the mean of the plain trainings before and after it. Groups are left out beside three twins that start one rounding unit apart, and 16 queries are "
    "evaluated after each. `memory`: of a reverse sweep of one query, beyond what the two derivatives of one step take, in multiples of parameters and "
    "optimizer state. `load`: processes that wanted to run at the end, on this many cores; CPU time is worth ±25 % on a busy machine.",
    "device": "Small runs on the device compared with the same runs on the CPU, then plain and recorded training in "
    "turns.",
}
CHECKS: Columns = (("check", "check"), ("passed", "passed"), ("found", "found"))
TABLES: dict[str, dict[str, Columns]] = {
    "record": {"rows": RECORD, "plans": PLANS},
    "embed": {"memory": MEMORY, "disk": DISK, "slopes": SLOPES},
    "query": {"rows": QUERY},
    "store": {"rows": STORE, "efficiency": EFFICIENCY},
    "peers": {"rows": PEERS},
    "serve": {"rows": SERVE},
    "exact": {"rows": EXACT},
    "device": {"checks": CHECKS, "recording": RECORD},
}


def page(result: Mapping[str, Mapping[str, Any]]) -> str:
    """The whole page, for the benchmarks that were run."""
    lines = [
        "# Benchmarks",
        "",
        provenance(f"python -m experiments bench {name}" for name in result),
        "",
        "Written by `make bench`.",
    ]
    lines += [
        "Times are wall time unless marked as CPU time. Recording, embedding in memory and queries: medians of interleaved",
        "repeats, without the first. Embedding from disk: medians of repeats. The efficiency table and the other",
        "libraries' index and queries: measured once, without a warm-up run (except for dattri LoGRA's compilation).",
    ]
    for name, values in result.items():
        lines += ["", f"## `python -m experiments bench {name}`", "", WORDS[name]]
        for part, columns in TABLES[name].items():
            lines += ["", *table(values.get(part, []), columns)]
    return "\n".join(lines) + "\n"


def table(rows: Sequence[Row], columns: Columns) -> list[str]:
    """Markdown lines; a column that no row fills is left out."""
    kept = filled(rows, columns)
    head = [f"| {' | '.join(heading for _, heading in kept)} |", "|" + "---|" * len(kept)]
    return head + [f"| {' | '.join(short(row.get(key)) for key, _ in kept)} |" for row in rows]


def filled(rows: Sequence[Row], columns: Columns) -> list[tuple[str, str]]:
    """The columns that some row fills."""
    return [(key, heading) for key, heading in columns if any(row.get(key) is not None for row in rows)]


def short(value: Any) -> str:
    """A cell."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value).replace("|", "/")
