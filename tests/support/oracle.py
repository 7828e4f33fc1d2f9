"""What the server must compute: dense attention with exactly the evicted keys masked, on Hugging Face."""

from __future__ import annotations

import torch


class DenseMasked:
    """Float32 reference. An event at length L hides its blocks from every query at position >= L."""

    def __init__(self, model_path: str, dtype: torch.dtype = torch.float32):
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(model_path, dtype=dtype, attn_implementation="eager").eval()

    @torch.no_grad()
    def logprobs(self, ids: list[int], events: list[dict], block: int, start: int) -> torch.Tensor:
        """Next-token log-probabilities after each position from ``start`` on: float32 ``[n - start, vocab]``."""
        n = len(ids)
        hidden = torch.full((n, n), torch.finfo(torch.float32).min).triu_(1)
        for event in events:
            for b in event["blocks"]:
                hidden[event["length"] :, b * block : (b + 1) * block] = torch.finfo(torch.float32).min
        mask = hidden[None, None].to(self.model.dtype)
        out = self.model(input_ids=torch.tensor([ids]), attention_mask=mask, logits_to_keep=n - start)
        return torch.log_softmax(out.logits[0].float(), dim=-1)


def worst_gap(answer: dict, reference: torch.Tensor) -> float:
    """Largest absolute difference over the server's reported top log-probabilities.

    Args:
        answer: of /generate with ``return_logprob`` and ``top_logprobs_num``.
        reference: ``[tokens, vocab]``, row i predicts output token i.
    """
    gap = 0.0
    for row, top in zip(reference, answer["meta_info"]["output_top_logprobs"], strict=True):
        for logprob, token, _ in top:
            gap = max(gap, abs(logprob - row[token].item()))
    return gap
