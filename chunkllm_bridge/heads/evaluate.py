"""How far the model follows its draft heads, on outputs that they were not trained on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from chunkllm_bridge.heads.generate import Said
    from chunkllm_bridge.plugins.medusa.heads import Heads

ROWS = 256  # places drafted from at once


def acceptance(heads: Heads, said: Sequence[Said], width: int) -> dict[str, dict[str, Any]]:
    """Per group, and for "all": `tokens_per_step`, `per_head`, `chain`, `places`, `covered`.

    tokens_per_step: the output made speculatively from its first token on, one token of the model's own in each step.
    chain[k]: share of places where the first k + 1 drafts are all right; per_head[k]: of head k, where those before it
    were right. covered: share of the output's tokens that the draft vocabulary has.
    """
    import torch

    steps: dict[str, list[int]] = {}
    right: dict[str, list[Any]] = {}
    known: dict[str, list[Any]] = {}
    for each in said:
        accepted = _accepted(heads, each, width)
        place = taken = 0
        while place < len(accepted):
            place += int(accepted[place]) + 1
            taken += 1
        for group in (each.group, "all"):
            made = steps.setdefault(group, [0, 0])
            made[0] += place
            made[1] += taken
            right.setdefault(group, []).append(accepted)
            known.setdefault(group, []).append(torch.isin(each.tokens.long(), heads.vocabulary.cpu()))
    report = {}
    for group, (tokens, taken) in sorted(steps.items(), key=lambda item: (item[0] == "all", item[0])):
        counts = torch.cat(right[group])
        chain = [float((counts > head).float().mean()) for head in range(width)]
        before = [1.0, *chain[:-1]]
        report[group] = {
            "tokens_per_step": round(tokens / taken, 3),
            "per_head": [round(own / ahead, 3) if ahead else 0.0 for own, ahead in zip(chain, before, strict=True)],
            "chain": [round(own, 3) for own in chain],
            "places": len(counts),
            "covered": round(float(torch.cat(known[group]).float().mean()), 4),
        }
    return report


def _accepted(heads: Heads, said: Said, width: int) -> Any:
    """(places,) int64: at each place with `width` tokens after it, how many drafts the model agrees with in a row."""
    import torch

    tokens = said.tokens.long()
    places = max(len(tokens) - width, 0)
    if not places:
        return torch.zeros(0, dtype=torch.long)
    device = heads.vocabulary.device
    drafts = [
        heads.chain(said.hidden[first : first + ROWS][: places - first].to(device), part.to(device), width).cpu()
        for first, part in zip(range(0, places, ROWS), tokens[:places].split(ROWS), strict=True)
    ]
    wanted = torch.stack([tokens[head : head + places] for head in range(1, width + 1)], 1)
    return (torch.cat(drafts) == wanted).long().cumprod(1).sum(1)
