"""The contract between the evictor and a policy. Whoever writes a policy needs to read no other file.

A policy is a frozen dataclass that derives from :class:`Policy`. It must write one method, :meth:`Policy.weigh`, and
may write a second, :meth:`Policy.prioritise`. One call is one event: one sequence is over its budget, and some of its
blocks have to go. The policy is given what was measured about the sequence's blocks and returns one number per block.
It knows nothing of requests, KV slots or SGLang::

    from dataclasses import dataclass

    import torch

    from nexus_sglang.policy import Blocks, Evidence, Policy, Weighing, check_range


    @dataclass(frozen=True)
    class Peak(Policy):
        \"\"\"Keep the blocks that any recent query looked at most, now or before.\"\"\"

        name = "peak"
        source = "an example"
        state_width = 1

        decay: float = 0.5

        def __post_init__(self) -> None:
            check_range(self.name, "decay", self.decay, 0, 1)

        def weigh(self, evidence: Evidence, blocks: Blocks) -> Weighing:
            before = blocks.state[:, 0].nan_to_num(0)
            weights = torch.maximum(evidence.attention.amax(dim=0), self.decay * before)
            return Weighing(weights, state=weights[:, None])

Shapes. N is how many blocks of the sequence still hold resident tokens. It differs from event to event, and blocks
that are gone are missing from it. W is how many queries of the query window there are: 16 by default, fewer while the
sequence is short, never 0. Every tensor is on one device.

What happens to the answer. Forced blocks stay. Of the candidates, those with the lowest priority are evicted, as many
as the evictor counts; among equals the older goes. Priorities are the weights unless the policy says otherwise. The
weight of a candidate is also remembered with the block: when memory runs short, blocks of cached sequences that no
request holds are evicted by it.

State. A policy that sets ``state_width`` returns that many floats per block, and gets them back as ``blocks.state`` at
the sequence's next event. A block that no event has judged yet has NaN there. State stays with the block's tokens, so a
sequence that continues a cached prefix finds what earlier ones left.

Rules:

1. **Pure.** The same arguments give the same answer. Keep nothing on the object and change no argument.
2. **Chance** comes from ``nexus_sglang.policy.parts.draws.uniforms(blocks.seed, blocks.identity, blocks.event, n)``: n
   numbers in (0, 1) per block, the same on every rank and whatever else is in the batch. Never from ``torch.rand``.
3. **Nothing waits for the device.** No ``.item()``, ``.tolist()``, ``float(tensor)`` or ``if tensor``, no indexing by a
   bool mask and no ``nonzero``: on a GPU each stops the host. ``torch.where`` and a product with a mask do not.
4. **No NaN** in weights or priorities of candidates. An event with one keeps the newest blocks instead, and so does one
   at which the policy raises or returns what does not fit. Nothing it said there is remembered. The server counts such
   events (``events_by_recency``, ``policy_errors``) and goes on. Infinities are allowed.
5. **Settings** are the dataclass's fields, each with a default. ``--kv-policy-config '{"decay": 0.9}'`` sets them.
   Refuse a bad value in ``__post_init__`` with a ValueError; :func:`check_range`, :func:`check_whole` and
   :func:`check_choice` write the message.

``--kv-policy module:Peak`` loads it. Before the model loads it is tried on made-up evidence (``policy/probe.py``), and
one that raises, or returns a wrong shape or NaN, is refused with one message.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch

HEAD_REDUCTIONS = ("max", "mean", "top", "qk")
"""What ``Policy.head_reduction`` may be."""
NOT_MEASURED: Any = None
"""In place of evidence that the policy did not ask for. A policy that reads it fails."""


class Evidence(NamedTuple):
    """What was measured about the N blocks of a sequence for this event: what the policy asked for, the rest is None.

    Attributes:
        attention: float32 ``[W, N]``, non-negative, if ``needs_attention``. Row w is window query w's attention, oldest
            query first, summed over each block's tokens, reduced over heads and layers by ``head_reduction``. A query
            attends to tokens up to its own position. Rows of ``max`` do not sum to 1.
        value_norm: float32 ``[N]``, non-negative, if ``needs_values``. Mean L2 norm of the value vectors of the block's
            tokens, over layers and heads.
        key_distinctiveness: float32 ``[N]`` in [0, 2], if ``needs_keys``. Mean of 1 - cos(key, mean direction of the
            sequence's keys) over the block's tokens, layers and heads.
        expected: float32 ``[N]``, non-negative, if ``needs_expected``. Attention expected of queries like the window's
            (arXiv 2510.00636) times the value norm, summed over the block's tokens, reduced over heads and layers by
            ``head_reduction``.
        value_distinctiveness: float32 ``[N]`` in [0, 2], if ``needs_distinct_values``. As ``key_distinctiveness``, of
            values.
    """

    attention: torch.Tensor = NOT_MEASURED
    value_norm: torch.Tensor = NOT_MEASURED
    key_distinctiveness: torch.Tensor = NOT_MEASURED
    expected: torch.Tensor = NOT_MEASURED
    value_distinctiveness: torch.Tensor = NOT_MEASURED


class Blocks(NamedTuple):
    """The blocks of one sequence that still hold resident tokens, in order.

    Attributes:
        index: int64 ``[N]``, ascending: the block's number in the sequence, position // block size. It never changes.
        forced: bool ``[N]``, the blocks that stay whatever the policy says: sinks, protected prefix, recent window.
        identity: int64 ``[N]``, a hash of the block's tokens and position. Random draws depend on it.
        state: float32 ``[N, state_width]``, what the policy returned with the block at earlier events. A block's row is
            NaN until an event at which it was a candidate.
        event: the sequence's length at this event, in tokens. Random draws depend on it.
        seed: the server's seed (``--kv-seed``). Random draws depend on it.
    """

    index: torch.Tensor  # type: ignore[assignment]  # hides tuple.index, which nobody needs here
    forced: torch.Tensor
    identity: torch.Tensor
    state: torch.Tensor
    event: int
    seed: int

    @property
    def candidates(self) -> torch.Tensor:
        """bool ``[N]``: the blocks the policy decides about."""
        return ~self.forced


class Weighing(NamedTuple):
    """A policy's answer.

    Attributes:
        weights: float ``[N]``, non-negative, no NaN: larger is more worth keeping. What it says of forced blocks is
            ignored.
        state: float ``[N, state_width]`` to keep with the blocks, as float32, or None to leave what is there. Only
            candidates take it: a forced block's state stays as it was. A block of a prefix that two sequences share has
            one state.
    """

    weights: torch.Tensor
    state: torch.Tensor | None = None


@dataclass(frozen=True)
class Policy(ABC):
    """Base of every policy.

    What a subclass says about itself, as class attributes without an annotation. With one, ``head_reduction: str =
    "max"``, it is a field and can be set by ``--kv-policy-config``. What depends on a field is a property.

    Attributes:
        name: what ``--kv-policy`` and messages call it.
        source: the paper, and in a few words how the block form differs from it; one line.
        head_reduction: how the attention of all heads and layers becomes one row per query. ``max`` and ``mean`` are of
            probabilities, ``top`` is the mean of the strongest few (layer, head) pairs, ``qk`` averages the queries and
            the keys over heads before the softmax.
        needs_attention: measure ``Evidence.attention``. The only one that is on without being asked for.
        needs_values: measure ``Evidence.value_norm``.
        needs_keys: measure ``Evidence.key_distinctiveness``.
        needs_expected: measure ``Evidence.expected``.
        needs_distinct_values: measure ``Evidence.value_distinctiveness``.
        state_width: floats of state per block, 0 for none.
    """

    name: ClassVar[str]
    source: ClassVar[str]
    # Without annotations, for the reason the docstring gives.
    head_reduction = "mean"
    needs_attention = True
    needs_values = False
    needs_keys = False
    needs_expected = False
    needs_distinct_values = False
    state_width = 0

    @abstractmethod
    def weigh(self, evidence: Evidence, blocks: Blocks) -> Weighing:
        """Say what each block of one sequence is worth.

        Args:
            evidence: what was measured.
            blocks: the blocks, and which of them are candidates.

        Returns:
            One weight per block, and the state to keep.
        """

    def prioritise(self, weights: torch.Tensor, blocks: Blocks, keep: int) -> torch.Tensor:
        """Say in which order candidates are kept. To be written where chance or ``keep`` has a part in the order.

        Args:
            weights: float ``[N]``, as :meth:`weigh` returned them.
            blocks: as :meth:`weigh` got them.
            keep: how many candidates will stay, from 0 to all; a number of the host.

        Returns:
            float64 ``[N]``, no NaN: larger is kept first, among equals the newer. The default is the weights: top-K.
        """
        return weights.double()


def check_choice(policy: str, field: str, value: object, options: Sequence[str]) -> None:
    """Refuse a value that is none of the options.

    Args:
        policy: the policy's name, for the message.
        field: the field's name, for the message.
        value: what the user gave.
        options: what is legal.

    Raises:
        ValueError: naming policy, field, value and options.
    """
    if value not in options:
        raise ValueError(f"{policy}: {field} {value!r} is not one of {', '.join(options)}")


def check_range(policy: str, field: str, value: object, low: float, high: float) -> None:
    """Refuse a value that is no number in [low, high].

    Args:
        policy: the policy's name, for the message.
        field: the field's name, for the message.
        value: what the user gave.
        low: smallest legal number.
        high: largest legal number.

    Raises:
        ValueError: naming policy, field, value and range.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise ValueError(f"{policy}: {field} {value!r} is not a number from {low:g} to {high:g}")


def check_whole(policy: str, field: str, value: object, low: int, high: int) -> None:
    """Refuse a value that is no whole number in [low, high].

    Args:
        policy: the policy's name, for the message.
        field: the field's name, for the message.
        value: what the user gave.
        low: smallest legal number.
        high: largest legal number.

    Raises:
        ValueError: naming policy, field, value and range.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"{policy}: {field} {value!r} is not a whole number from {low} to {high}")
