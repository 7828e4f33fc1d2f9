"""docs/results/policies.md from results.json, pilot.json and values.json alone: same files, same bytes."""

from __future__ import annotations

from benchmarks.offline.tables import pilot_table, tables, values_table

PAGE = """\
# Eviction policies on recall tasks

Every policy with its defaults, question visible and hidden; then how the defaults of `nexus` were found. What the
policies do and what follows from these numbers is in [../design/policies.md](../design/policies.md). Made by

    python -m benchmarks.policies.run
    python -m benchmarks.policies.pilot --passages 3
    python -m benchmarks.policies.values

and written by `python -m benchmarks.pages policies.md`.

## How it was measured

SmolLM2-135M-Instruct in float32 on a CPU, one thread. Tasks, in the manner of RULER: `needle` (one number in filler),
`multi-key` (three keyed numbers, each asked for), `variables` (which variable another one is equal to: one hop, since
this model does not follow two). Everything is prefilled, one eviction event cuts the cache to 10 %, 20 % or 50 % of the
tokens read, and the answer is read off what is left. *Visible*: the question ends the prompt, so the window of 16
queries is the question. *Hidden*: the event comes after the passage and the question is asked then. The whole answer is
scored on the reduced cache (on a server the first token still comes from the full one).

Cells: exact match of the whole answer under greedy decoding, its 95 % Wilson interval, mean log-probability of the
answer's tokens. Questions about one passage are not independent, so the Wilson intervals are somewhat too narrow; the
paired differences below each table take passages as units. "kept" is the share of tokens resident.

Rows marked *per layer* are the offline references, as the papers ran them: `nexus-paper` per layer on blocks with
queries and keys averaged over heads; `snapkv` per layer and KV head on tokens (window 16, max pooling over 7);
`pyramidkv` with room falling linearly over the layers (beta 20); `ada-snapkv` with a layer's room shared out among its
heads (floor 0.2). They need block tables per layer or head, which SGLang does not have.

## Every policy

{tables}

## Variants of `nexus`: which blocks stay

On passages with other seeds (600,000 on) than the table above (100,000 on), by a cheap measure: how often the block
that holds the answer is still there. *Stream* is the case without any question: the passage is read 128 tokens at a
time and cut to 20 % of its final length after each step. Six passages, 15 questions: differences under about 0.2 are
noise. Random selectors are averaged over eight seeds. Unless the label says otherwise: maximum over heads, walk 0.5,
values 0.6, nothing drawn, 64 recent tokens.

{pilot}

## Variants of `nexus`: the share of unusual values

On documents of `nexus-sglang eval` and on filler, again with seeds of their own. Exact match and mean log-probability
of the answer's tokens; `nexus` with nothing else changed.

{values}
"""


def render(records: list[dict], pilot: dict[str, dict[str, list[float]]], values: list[dict]) -> str:
    """The page as Markdown.

    Args:
        records: what run.py wrote.
        pilot: what pilot.py wrote.
        values: what values.py wrote.
    """
    return PAGE.format(tables=tables(records), pilot=pilot_table(pilot), values=values_table(values))
