"""Where true edges stand among candidates, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from gnnautoscale.errors import InputError
from gnnautoscale.tasks.decoders import Decoder
from gnnautoscale.tasks.pairs import Pairs, keys_of

# Scores that are held at a time, and values of rows.
_MOST_SCORES, _MOST_VALUES = 2**24, 2**25
# Scores that differ by less, relative to the largest one, are equal.
_ROUNDING = 1e-6


class KnownEdges:
    """All edges that are known to be true, to be left out of candidates."""

    def __init__(self, keys: Tensor, num_nodes: int) -> None:
        self._keys: Tensor = torch.unique(keys)
        self._num_nodes = num_nodes

    def contain(self, source: Tensor, target: Tensor, relation: Tensor | None) -> Tensor:
        """Whether triples are known edges; waits for nothing on a GPU, where the keys are kept as well."""
        if not self._keys.numel():
            return torch.zeros_like(source, dtype=torch.bool)
        if self._keys.device != source.device:
            self._keys = self._keys.to(source.device)
        keys = keys_of(source, target, relation, self._num_nodes)
        place = torch.searchsorted(self._keys, keys).clamp(max=self._keys.numel() - 1)
        return self._keys[place] == keys

    def partners(self, source: Tensor, relation: Tensor | None) -> tuple[Tensor, Tensor]:
        """Known targets of sources: which source, by its place, and which target; both ``[count]``."""
        keys = self._keys.to(source.device)
        first = keys_of(source, torch.zeros_like(source), relation, self._num_nodes)
        begin, end = torch.searchsorted(keys, first), torch.searchsorted(keys, first + self._num_nodes)
        counts = end - begin
        row = torch.arange(source.numel(), device=source.device).repeat_interleave(counts)
        offsets = torch.arange(row.numel(), device=source.device) - (counts.cumsum(0) - counts)[row]
        return row, keys[begin[row] + offsets] % self._num_nodes


def check_relations(relation: Tensor | None, num_relations: int | None) -> None:
    """Refuse relations of asked pairs that are not among those that were trained on, if that is known."""
    if num_relations is None:
        return
    if relation is None:
        fix = "Pass one for each pair (--relation, or the column relation of --pairs)."
        raise InputError("pairs of typed edges need a relation", got="none", fix=fix)
    if relation.numel() and not 0 <= int(relation.min()) <= int(relation.max()) < num_relations:
        got, fix = f"{int(relation.min())} to {int(relation.max())}", "Check the numbering."
        raise InputError(f"relations must be from 0 to {num_relations - 1}", got=got, fix=fix)


def with_negatives(pairs: Pairs, known: KnownEdges, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor | None]:
    """Edges, and as many pairs of random nodes without a known edge, or a few less: ends, labels and relations."""
    drawn = torch.stack([pairs.draw((pairs.ends.size(1),), generator, end) for end in (0, 1)])
    kept = ~known.contain(drawn[0], drawn[1], pairs.relation) & (drawn[0] != drawn[1])
    ends = torch.cat([pairs.ends, drawn[:, kept]], dim=1)
    relation = None if pairs.relation is None else torch.cat([pairs.relation, pairs.relation[kept]])
    return ends, torch.arange(ends.size(1)) < pairs.ends.size(1), relation


def pair_scores(decoder: nn.Module, out: Tensor, ends: Tensor, relation: Tensor | None) -> Tensor:
    """Scores of pairs, ``[num_pairs]``, in host memory; ``out`` holds rows of all nodes, ``[num_nodes, width]``."""
    device = _device(decoder, out)
    size = max(1, _MOST_VALUES // max(out.size(1), 1))
    scores = [torch.empty(0)]
    for start in range(0, ends.size(1), size):
        source, target = (out[end[start : start + size].to(out.device)].to(device) for end in ends)
        kind = () if relation is None else (relation[start : start + size].to(device),)
        scores.append(decoder(source, target, *kind).float().cpu())
    return torch.cat(scores)


def ranks(
    decoder: nn.Module,
    out: Tensor,
    pairs: Pairs,
    known: KnownEdges,
    candidates: Tensor | None = None,
    *,
    backwards: bool = False,
) -> Tensor:
    """The rank of each pair's target, from 1, among candidates that have no known edge; ties count half.

    Args:
        decoder: Scores pairs.
        out: Rows of all nodes, ``[num_nodes, width]``.
        pairs: True edges.
        known: Edges that are no candidates, by source and target; by target and source if ``backwards``.
        candidates: Nodes for each pair, ``[num_pairs, count]``, or ``None`` for all nodes.
        backwards: Whether to rank sources, given targets.
    """
    given, wanted = pairs.ends.flip(0) if backwards else pairs.ends
    found = [torch.empty(0, dtype=torch.double)]
    for piece in _pieces(pairs.ends.size(1), out, candidates):
        kind = None if pairs.relation is None else pairs.relation[piece]
        source, target = given[piece], wanted[piece]
        if candidates is None:
            scores = _against_all(decoder, out, source, kind, backwards=backwards)
            low, high = pairs.range_of(0 if backwards else 1)
            scores[:, :low] = scores[:, high:] = -torch.inf
            row, partner = (place.to(scores.device) for place in known.partners(source, kind))
            own = scores.gather(1, target.to(scores.device).unsqueeze(1))
            scores[row, partner] = -torch.inf
            scores.scatter_(1, target.to(scores.device).unsqueeze(1), -torch.inf)
        else:
            chosen = candidates[piece]
            count = chosen.size(1)
            repeated, kinds = source.repeat_interleave(count), None if kind is None else kind.repeat_interleave(count)
            ends = torch.stack([repeated, chosen.flatten()])
            scores = pair_scores(decoder, out, ends.flip(0) if backwards else ends, kinds).view(-1, count)
            own = pair_scores(decoder, out, torch.stack([target, source] if backwards else [source, target]), kind)
            own = own.unsqueeze(1)
            # The target itself is no candidate, also where nobody knows the edge.
            true = known.contain(repeated, chosen.flatten(), kinds).view(-1, count) | (chosen == target.unsqueeze(1))
            scores = scores.masked_fill(true, -torch.inf)
        # A product of matrices rounds equal rows differently, depending on where they are.
        slack = _ROUNDING * torch.maximum(own.abs(), scores.abs().nan_to_num(posinf=0.0).amax(dim=1, keepdim=True))
        above, level = (scores > own + slack).sum(dim=1), ((scores - own).abs() <= slack).sum(dim=1)
        found.append((1 + above + level / 2).double().cpu())
    return torch.cat(found)


def best_partners(
    decoder: nn.Module,
    out: Tensor,
    node: int,
    relation: int | None,
    count: int,
    known: KnownEdges | None,
    among: tuple[int, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """The nodes with the best scores as targets of a node, and these, both ``[count]``; known targets are left out.

    Targets are ``among`` the nodes from one number to another, exclusive.
    """
    source = torch.tensor([node])
    kind = None if relation is None else torch.tensor([relation])
    scores = _against_all(decoder, out, source, kind)
    scores[0, node] = -torch.inf
    if among is not None:
        scores[0, : among[0]] = scores[0, among[1] :] = -torch.inf
    if known is not None:
        scores[0, known.partners(source, kind)[1].to(scores.device)] = -torch.inf
    best = scores[0].topk(min(count, int((scores[0] > -torch.inf).sum())))
    return best.indices.cpu(), best.values.cpu()


def _against_all(
    decoder: nn.Module, out: Tensor, source: Tensor, relation: Tensor | None, *, backwards: bool = False
) -> Tensor:
    """Scores of some sources with all nodes, ``[num_sources, num_nodes]``."""
    device, num_nodes = _device(decoder, out), out.size(0)
    kind = None if relation is None else relation.to(device)
    if isinstance(decoder, Decoder) and type(decoder).forward is Decoder.forward:
        queries = decoder.query(out[source.to(out.device)].to(device), kind, backwards=backwards)
        # Piece by piece, since rows in host memory may be more than a GPU takes.
        size = max(1, _MOST_VALUES // max(out.size(1), 1))
        starts = range(0, num_nodes, size)
        return torch.cat([queries @ out[at : at + size].to(device).t() for at in starts], dim=1).float()
    ends = torch.stack([source.repeat_interleave(num_nodes), torch.arange(num_nodes).repeat(source.numel())])
    kinds = None if relation is None else relation.repeat_interleave(num_nodes)
    return pair_scores(decoder, out, ends.flip(0) if backwards else ends, kinds).view(-1, num_nodes)


def _pieces(count: int, out: Tensor, candidates: Tensor | None) -> Iterator[slice]:
    each = out.size(0) if candidates is None else candidates.size(1)
    size = max(1, _MOST_SCORES // max(each, 1))
    return (slice(start, start + size) for start in range(0, count, size))


def _device(decoder: nn.Module, out: Tensor) -> torch.device:
    return next((weight.device for weight in decoder.parameters()), out.device)
