"""From records (see ``experiment.run_sample``) to the tables of docs/results/policies.md: same records, same bytes."""

from __future__ import annotations

from benchmarks.offline.wilson import wilson
from nexus_sglang.evaluation.intervals import mean_and_error


def labels_of(records: list[dict], setting: str) -> list[str]:
    """Labels that every record has at every share, in the order of the first record."""
    first = next(iter(records[0][setting].values()))
    return [label for label in first if all(label in s for r in records for s in r[setting].values())]


def _average(record: dict, setting: str, label: str, field: int) -> float:
    cells = record[setting].values()
    return sum(scores[label][field] for scores in cells) / len(cells)


def _passages(records: list[dict]) -> list[tuple]:
    return [(record["task"], record["seed"]) for record in records]


def ranking(records: list[dict], setting: str, field: int = 0) -> list[tuple[str, float]]:
    """Labels with their mean over questions and shares, best first. ``field`` 0: exact match; 1: log-probability."""
    scored = [
        (label, sum(_average(r, setting, label, field) for r in records) / len(records))
        for label in labels_of(records, setting)
    ]
    return sorted(scored, key=lambda item: (-item[1], item[0]))


def difference(records: list[dict], setting: str, first: str, second: str, field: int = 0) -> tuple[float, float]:
    """Mean of ``first - second`` over questions (each averaged over the shares), and half its 95 % interval."""
    gaps = [_average(r, setting, first, field) - _average(r, setting, second, field) for r in records]
    mean, error = mean_and_error(gaps, _passages(records))
    return mean, 1.959964 * error


def _cell(records: list[dict], setting: str, share: str, label: str) -> str:
    scores = [record[setting][share][label] for record in records]
    right = sum(score[0] for score in scores)
    n = len(scores)
    low, high = wilson(right, n)
    logprob = sum(score[1] for score in scores) / n
    return f"{right / n:.2f} ({low:.2f}-{high:.2f}) {logprob:.2f}"


def _table(records: list[dict], setting: str) -> list[str]:
    shares = list(records[0][setting])
    heads = [f"{float(share):.0%}".replace("%", " %") for share in shares]
    lines = [f"| policy | {' | '.join(heads)} | average | kept |", "|---" * (len(shares) + 3) + "|"]
    for label, mean in ranking(records, setting):
        cells = [_cell(records, setting, share, label) for share in shares]
        logprob = sum(_average(r, setting, label, 1) for r in records) / len(records)
        kept = [sum(r[setting][share][label][2] for r in records) / len(records) for share in shares]
        shown = f"**{label}**" if label == "nexus" else label
        lines.append(
            f"| {shown} | {' | '.join(cells)} | {mean:.3f} {logprob:.2f} | {' / '.join(f'{k:.3f}' for k in kept)} |"
        )
    return lines


def _against(records: list[dict], setting: str) -> list[str]:
    """``nexus`` minus every other label: exact match and log-probability, paired, with 95 % intervals."""
    lines = ["| nexus minus | exact match | log-probability |", "|---|---|---|"]
    for label, _ in ranking(records, setting):
        if label != "nexus":
            exact, logprob = (difference(records, setting, "nexus", label, field) for field in (0, 1))
            lines.append(f"| {label} | {exact[0]:+.3f} ± {exact[1]:.3f} | {logprob[0]:+.3f} ± {logprob[1]:.3f} |")
    return lines


def tables(records: list[dict]) -> str:
    """Every policy, question visible and hidden; ``records`` is results.json (see benchmarks/policies/run.py)."""
    records = sorted(records, key=lambda r: (r["task"], r["seed"]))
    tasks = sorted({record["task"] for record in records})
    counts = ", ".join(f"{sum(r['task'] == t for r in records)} {t}" for t in tasks)
    right = sum(record["full"][0] for record in records)
    low, high = wilson(right, len(records))
    by_task = ", ".join(
        f"{t} {sum(r['full'][0] for r in records if r['task'] == t) / sum(r['task'] == t for r in records):.2f}"
        for t in tasks
    )
    logprob = sum(record["full"][1] for record in records) / len(records)
    sizes = [record["tokens"] for record in records]
    out = [
        f"{len(records)} questions ({counts}) about {len(set(_passages(records)))} passages of {min(sizes)} to "
        f"{max(sizes)} tokens; seeds {min(r['seed'] for r in records)} to {max(r['seed'] for r in records)}. "
        f"Full cache: {right / len(records):.2f} ({low:.2f}-{high:.2f}), log-probability {logprob:.2f}; by task "
        f"{by_task}.",
    ]
    for setting in ("visible", "hidden"):
        out += ["", f"### Question {setting}", "", *_table(records, setting)]
        if "nexus" in labels_of(records, setting):
            out += ["", *_against(records, setting)]
    return "\n".join(out)


def pilot_table(pilot: dict[str, dict[str, list[float]]]) -> str:
    """Which variants keep the block a question needs; ``pilot`` is pilot.json (see benchmarks/policies/pilot.py)."""
    lines = [
        "| variant | visible 10 / 20 / 50 % | hidden 10 / 20 / 50 % | stream 20 % |",
        "|---|---|---|---|",
    ]
    for label, kinds in pilot.items():
        cells = [" / ".join(f"{hit:.2f}" for hit in kinds.get(kind, [])) for kind in ("visible", "hidden", "stream")]
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(lines)


def values_table(records: list[dict]) -> str:
    """Exact match and log-probability by value share; ``records`` is values.json (benchmarks/policies/values.py)."""
    shares = list(records[0]["visible"])
    columns = [(setting, share) for setting in ("visible", "hidden") for share in shares]
    lines: list[str] = []
    for kind in dict.fromkeys(record["kind"] for record in records):
        mine = [record for record in records if record["kind"] == kind]
        exact, logprob = (sum(r["full"][field] for r in mine) / len(mine) for field in (0, 1))
        lines += [
            "",
            f"{kind[0].upper()}{kind[1:]}: {len(mine)} questions about {len(set(_passages(mine)))} passages; "
            f"full cache {exact:.2f} {logprob:.2f}.",
            "",
            "| variant | "
            + " | ".join(f"{setting} {float(share):.0%}".replace("%", " %") for setting, share in columns)
            + " |",
            "|---" * (len(columns) + 1) + "|",
        ]
        for label in labels_of(mine, "visible"):
            cells = [[r[setting][share][label] for r in mine] for setting, share in columns]
            shown = [
                f"{sum(c[0] for c in cell) / len(cell):.2f} {sum(c[1] for c in cell) / len(cell):.2f}" for cell in cells
            ]
            lines.append(f"| {label} | {' | '.join(shown)} |")
    return "\n".join(lines).lstrip()
