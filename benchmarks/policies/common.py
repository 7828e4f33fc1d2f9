"""What the two scripts share: the model, and a loop that can be stopped and taken up again."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from benchmarks.offline.experiment import Contestants, run_sample
from benchmarks.offline.reader import Reader
from nexus_sglang.evaluation.plan import SETTINGS
from nexus_sglang.evaluation.recall import RECALL_TASKS
from nexus_sglang.harness.models import ensure_model

SHARES = [0.1, 0.2, 0.5]


def open_reader() -> Reader:
    """The demo model in float32, on one thread."""
    torch.set_num_threads(1)
    return Reader.load(ensure_model("smollm2-135m", log=print))


def save(records: list[dict], path: Path) -> None:
    """One record per line inside one JSON list, moved into place whole."""
    scratch = path.with_suffix(".part")
    scratch.write_text("[\n" + ",\n".join(json.dumps(record) for record in records) + "\n]\n")
    scratch.replace(path)


def run_all(reader: Reader, plan: list[tuple[str, int, int]], contestants: Contestants, path: Path) -> None:
    """Run what is missing from a result file, saving after each passage.

    Args:
        reader: the model.
        plan: (task, seed, tokens) of every passage.
        contestants: by label; those that the file has for a passage are not run again.
        path: of the file.

    A label whose policy has changed must be deleted from the file first (run.py --again LABEL).
    """
    records = json.loads(path.read_text()) if path.exists() else []
    started = time.time()
    for number, (task, seed, tokens) in enumerate(plan):
        mine = [record for record in records if (record["task"], record["seed"]) == (task, seed)]
        present = set.intersection(*(_labels(record) for record in mine)) if mine else set()
        missing = {label: entry for label, entry in contestants.items() if label not in present}
        if not missing:
            continue
        sample = RECALL_TASKS[task](seed, tokens, lambda text: len(reader.ids(text)))
        fresh = run_sample(reader, sample, missing, SHARES)
        if mine:
            for old, new in zip(mine, fresh, strict=True):
                for setting in SETTINGS:
                    for share, scores in new[setting].items():
                        old[setting][share].update(scores)
        else:
            records += fresh
        save(records, path)
        print(
            f"{number + 1}/{len(plan)} {task} {seed}: {len(missing)} labels, {time.time() - started:.0f} s", flush=True
        )


def _labels(record: dict) -> set[str]:
    return set.intersection(*(set(scores) for setting in SETTINGS for scores in record[setting].values()))
