"""How the small studies print: their tables and a few plain words."""

from collections.abc import Mapping
from typing import Any

from backstory.cli import output

Found = Mapping[str, Any]


def limit_table(result: Found) -> None:
    """Ratios and their standard errors."""
    rows = [
        (curve["model"], p["steps"], f"{p['ratio']:.3f} ± {p['error']:.3f}", f"{p['expected']:.3g}", f"{p['influence']:.3g}")
        for curve in result["curves"]
        for p in curve["points"]
    ]  # fmt: skip
    title = f"T × expected TSLOO over the influence function, {len(result['seeds'])} seeds, rate {result['rate']:g}"
    output.table(title, ("model", "T", "ratio ± standard error", "T × expected TSLOO", "influence function"), rows)


def kinks_table(result: Found) -> None:
    """Gaps for shrinking removals, and what a smooth net would not have."""
    rows = [(r["activation"], r["kind"], *(f"{g:.2g}" for g in r["gaps"]), _share(r)) for r in result["rows"]]
    gaps = [f"gap, f = {f:g}" for f in result["rows"][0]["factors"]]
    title = (
        f"Gap between exact unrolling and retraining, of the truth's size: {result['setup']['images']} images, "
        f"{result['setup']['epochs']} epochs, {result['removals']} removals, seeds {_list(result['seeds'])}"
    )
    output.table(title, ("activation", "removal", *gaps, "kinks' share (seeds)"), rows)
    for kind, share in result["beyond"].items():
        if share is not None:
            output.out.print(
                f"{kind}: {share:.0%} of ReLU's gap is not there with GELU in the same run.", soft_wrap=True
            )


def _share(row: Found) -> str:
    if row["share"] is None:
        return "not settled: take smaller f"
    return _each(row["share"], row["share_seeds"])


def bound_table(result: Found) -> None:
    """Constants, errors with bounds, and the verdict in words."""
    k = result["constants"]
    what = [("T", k["T"]), ("weights", k["parameters"]), *((n, f"{k[n]:.4g}") for n in ("C", "G", "L", "Lambda"))]
    what += [("32/3 G² C³ L e^(CΛ)", f"{k['theorem']:.3g}"), ("with the proof's exponent", f"{k['proof']:.3g}")]
    what += [("largest growth ∏ ‖I − ηH‖", f"{k['growth']:.4g}")]
    what += [(f"‖H − {n}‖ / ‖H‖, mean", f"{v:.2f}") for n, v in k["deviation"].items()]
    output.table("Constants, measured along the run", ("constant", "value"), what)
    output.table(
        "Loss: error, and in brackets its bound by the proof's chain",
        ("sample", "step", "truth", "exact unrolling", "embedding, GGN", "embedding, empirical"),
        [
            (r["sample"], r["step"], f"{r['truth']:+.2e}", *(_error(r[n]) for n in ("hessian", "ggn", "empirical")))
            for r in result["rows"]
        ],
    )
    for line in bound_words(result["verdict"]):
        output.out.print(line, soft_wrap=True)


def _error(estimate: Found) -> str:
    return f"{estimate['error']:.1e} ({estimate['bound']:.1e})"


def bound_words(verdict: Found) -> list[str]:
    """What the numbers say, in plain words."""
    theorem, chain = verdict["theorem"], verdict["proof_chain"]
    far = theorem["against_distance"]
    lines = [
        f"The theorem {_held(theorem)}; it is {theorem['looseness']:.1g} times the error of exact unrolling (median), and "
        f"{far:.1g} times the whole distance between the two runs: it says {'nothing' if far > 1 else 'something'}.",
        f"The proof's chain for each removal {_held(chain)}; it is {chain['looseness']:.1g} times that error.",
    ]
    for name, words in (("hessian", "exact unrolling"), ("ggn", "GGN"), ("empirical", "empirical Fisher")):
        v = verdict[name]
        lines.append(
            f"Loss, {words}: error {v['error_of_truth']:.2g} of the truth (median), bound {v['bound_of_truth']:.2g} times the "
            f"truth; the bound {_held(v)}."
        )
    return lines


def _held(verdict: Found) -> str:
    return "held" if verdict["held"] else "did NOT hold"


def duplicates_table(result: Found) -> None:
    """Correlations for early and late copies and their differences."""
    truth = result["truth"]
    rows = [("retraining (truth)", *[""] * 3, f"{truth['early_size']:.2g}", f"{truth['late_size']:.2g}", "")]
    rows += [
        (
            r["method"], *(_each(r[kind], r[f"{kind}_seeds"]) for kind in ("early", "late", "difference")),
            f"{r['early_size']:.2g}", f"{r['late_size']:.2g}", "one number" if r["one_number"] else "two numbers",
        )
        for r in result["rows"]
    ]  # fmt: skip
    title = f"Copies of {result['copies']} samples: Spearman with retraining, mean (each of the seeds {_list(result['seeds'])})"
    names = ("method", "early", "late", "late − early", "median |early|", "median |late|", "a sample's copies get")
    output.table(title, names, rows)


def ablation_table(result: Found) -> None:
    """Correlations and bytes of every cell, full coordinates first."""
    rows = [
        ("full", "", "empirical, auto" if r["curvature"] == "empirical" else "exact", "", "", *_correlations(r))
        for r in result["full"]
    ]
    rows += [
        (r["projection"], r["rank"], r["curvature"], r["warmup"], f"{r['bytes']:,.0f}", *_correlations(r))
        for r in result["rows"]
    ]
    title = (
        f"Spearman with full coordinates and with retraining: {result['setup']['images']} images, "
        f"{result['setup']['epochs']} epochs, {result['removals']} removals, mean of the seeds {_list(result['seeds'])}"
    )
    output.table(title, ("projection", "rank", "curvature", "warm-up", "bytes", "full", "single", "all"), rows)


def _correlations(row: Found) -> list[str]:
    return [f"{row[kind]:.3f}" for kind in ("full", "single", "all")]


def _each(mean: float, seeds: list[float]) -> str:
    return f"{mean:.2f} ({', '.join(f'{x:.2f}' for x in seeds)})"


def _list(values: list[int]) -> str:
    return ", ".join(map(str, values))
