"""An SGLang frontend program: one long shared context, three branches by ``fork``.

    python examples/frontend_program.py --url http://127.0.0.1:30000

``fork`` sends the context alone first, so it is cut to its budget before any question is seen. The branches
then read the same cached context and compute only their own question; none evicts from what others hold.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import sglang as sgl
from service_log import service_log
from sglang import RuntimeEndpoint

QUESTIONS = (
    "Which disk is full?",
    "Who rolled back release 4.2?",
    "Which gateway has a certificate that expires on Friday?",
)


@sgl.function
def read_log(s: Any, context: str, questions: tuple[str, ...]) -> None:
    """Three questions about one context, asked in parallel."""
    s += sgl.system("You answer questions about a log in one short sentence.")
    s += sgl.user_begin() + "Log:\n" + context + "\n\n"
    s.sync()  # else fork may find the text above not submitted yet, and does not send it ahead
    branches = s.fork(len(questions))
    for branch, question in zip(branches, questions, strict=True):
        branch += question + sgl.user_end()
        branch += sgl.assistant(sgl.gen("answer", max_tokens=32, temperature=0))
    s["answers"] = [branch["answer"] for branch in branches]
    s["meta"] = [branch.get_meta_info("answer") for branch in branches]


def main(argv: list[str] | None = None) -> int:
    """Fork and print what each branch found."""
    parser = argparse.ArgumentParser(description="Fork a long context into three branches.")
    parser.add_argument("--url", default="http://127.0.0.1:30000", help="SGLang server (default %(default)s)")
    parser.add_argument("--chat-template", default="chatml", help="frontend template name (default %(default)s)")
    args = parser.parse_args(argv)
    try:
        sgl.set_default_backend(RuntimeEndpoint(args.url.rstrip("/"), chat_template_name=args.chat_template))
    except OSError as err:
        print(f"frontend_program: {args.url}: {err}", file=sys.stderr)
        return 1
    state = read_log.run(context=service_log(), questions=QUESTIONS)
    if state.error() is not None:
        print(f"frontend_program: {state.error()}", file=sys.stderr)
        return 1
    for question, answer, meta in zip(QUESTIONS, state["answers"], state["meta"], strict=True):
        held = (meta.get("nexus") or [{}])[0]
        print(f"user:  {question}\nagent: {' '.join(answer.split())}")
        numbers = {"prompt": meta["prompt_tokens"], "cached": meta["cached_tokens"]}
        numbers |= {key: held[key] for key in ("logical", "resident", "evicted") if key in held}
        print("       " + ", ".join(f"{name} {value:,}" for name, value in numbers.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
