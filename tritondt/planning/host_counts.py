"""Elements that each rank sends in a step between stages of hosts, without a list of the parts of its messages.

Ranks at the same place of hosts mostly send alike: to the ranks at one place of all hosts, or inside their own. Their
messages are then one object, and a world of 65,536 ranks takes seconds.
"""

from array import array
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence

from tritondt.planning.between_hosts import Item, Pairing, Span, Stage, overlapping

# (position, elements) of some receivers, two int64 for each.
Pairs = bytes


class HostCounts:
    """Receivers of each rank from one stage to the next on one mesh, and the elements for each.

    A rank may be among its own receivers, with elements that it keeps; `kept` has these, and `arriving` counts them.
    `count_pairs` is told how many pairs are listed, and refuses too many.
    """

    def __init__(self, pairing: Pairing, before: Stage, after: Stage, count_pairs: Callable[[int], None]) -> None:
        self._pairing, self._count_pairs = pairing, count_pairs
        num_ranks = len(pairing.hosts)
        # Of each rank what it alone sends, and the keys of what several send.
        self._own: list[dict[int, int]] = [{} for _ in range(num_ranks)]
        self._keys: list[list[Hashable]] = [[] for _ in range(num_ranks)]
        self._shared: dict[Hashable, dict[int, int]] = {}
        if (before, after) == ("source", "terms"):
            self._reduce_inside()
        elif (before, after) == ("shares", "target"):
            self._spread_inside()
        else:
            self._cross(before, after)
        self.served = self._joined()
        self.kept, self.arriving = [0] * num_ranks, [0] * num_ranks
        self._count_arriving()

    def _joined(self) -> list[Pairs]:
        """The receivers of each rank, equal ones as one object."""
        texts: dict[tuple[Hashable, ...], Pairs] = {}
        found = []
        for own, keys in zip(self._own, self._keys, strict=True):
            if own or tuple(keys) not in texts:
                merged = defaultdict[int, int](int, own)
                for key in keys:
                    for receiver, numel in self._shared[key].items():
                        merged[receiver] += numel
                self._count_pairs(len(merged))
                text = array("q", (number for pair in sorted(merged.items()) for number in pair)).tobytes()
                if own:
                    found.append(text)
                    continue
                texts[tuple(keys)] = text
            found.append(texts[tuple(keys)])
        return found

    def _count_arriving(self) -> None:
        senders = defaultdict[Pairs, list[int]](list)
        for position, served in enumerate(self.served):
            senders[served].append(position)
        for served, positions in senders.items():
            pairs = array("q", served)
            to = dict(zip(pairs[::2], pairs[1::2], strict=True))
            for receiver, numel in to.items():
                self.arriving[receiver] += len(positions) * numel
            for position in positions:
                self.kept[position] = to.get(position, 0)

    def _send(self, sender: int, receiver: int, numel: int) -> None:
        if numel:
            own = self._own[sender]
            own[receiver] = own.get(receiver, 0) + numel

    def _totals(self, items: Iterable[Item], size: int) -> list[int]:
        """Elements of items in each part where these are cut among so many ranks."""
        found = [0] * size
        for item in items:
            for part, start, stop in self._pairing.cut(item, size):
                found[part] += stop - start
        return found

    def _reduce_inside(self) -> None:
        pairing, groups = self._pairing, defaultdict[tuple[object, ...], list[Item]](list)
        for item in pairing.items:
            cover = pairing.cover_of[item.number]
            groups[item.held_as, id(cover), pairing.num_wanting[item.wanted_as] if cover.full else None].append(item)
        for items in groups.values():
            totals: dict[int, list[int]] = {}
            for host in pairing.cover_of[items[0].number].place_of:
                if not pairing.has_terms(items[0], host):
                    continue
                ranks = pairing.ranks_of[host]
                if len(ranks) not in totals:
                    totals[len(ranks)] = self._totals(items, len(ranks))
                for replicas in pairing.reduced_on(items[0], host):
                    for receiver, numel in zip(ranks, totals[len(ranks)], strict=True):
                        self._send(pairing.replica_for(replicas, receiver), receiver, numel)

    def _spread_inside(self) -> None:
        pairing, groups = self._pairing, defaultdict[object, list[Item]](list)
        for item in pairing.items:
            groups[item.wanted_as].append(item)
        for items in groups.values():
            kept = defaultdict[int, list[Item]](list)
            for item in () if pairing.reduced_axes else items:
                for host in pairing.common_hosts(item):
                    kept[host].append(item)
            totals = {size: self._totals(items, size) for size in pairing.host_sizes}
            for host, receivers in pairing.wanting[items[0].wanted_as].items():
                ranks = pairing.ranks_of[host]
                rest = self._totals(kept[host], len(ranks)) if host in kept else [0] * len(ranks)
                for server, numel, stays in zip(ranks, totals[len(ranks)], rest, strict=True):
                    for receiver in receivers:
                        self._send(server, receiver, numel - stays)
                for item in kept.get(host, ()):
                    self._send_whole(item, host, receivers)

    def _send_whole(self, item: Item, host: int, receivers: Iterable[int]) -> None:
        """Adds what the ranks of a host that hold the whole of an item send inside it."""
        replicas = self._pairing.holders[item.held_as][host][0]
        for receiver in receivers:
            self._send(self._pairing.replica_for(replicas, receiver), receiver, item.numel)

    def _cross(self, before: Stage, after: Stage) -> None:
        pairing, adding = self._pairing, dict[int, Item]()
        for item in pairing.items:
            stage, cover = pairing.as_held(before, item), pairing.cover_of[item.number]
            if stage == "terms" and not cover.full:
                adding[id(cover)] = item
                for size in pairing.host_sizes:
                    self._add_terms(item, after, size)
            elif stage == "sums":
                for span in pairing.sums(item):
                    self._add_wanting(item, after, span)
            elif stage != pairing.as_held(after, item):  # else all of its terms stay where they are
                for host in cover.full:
                    if pairing.served_by(item, host):
                        self._add_whole(item, stage, after, host)
        for item in adding.values():
            self._add_senders_of_terms(item)

    def _add_senders_of_terms(self, item: Item) -> None:
        """Notes on which ranks the terms of an item's cover are."""
        cover = self._pairing.cover_of[item.number]
        for ranks in map(self._pairing.ranks_of.__getitem__, cover.terms_of):
            for part, rank in enumerate(ranks):
                if (id(cover), len(ranks), part) in self._shared:
                    self._keys[rank].append((id(cover), len(ranks), part))

    def _add_terms(self, item: Item, after: Stage, size: int) -> None:
        """Adds what every host of so many ranks sends of its terms of an item, by the part of the sender."""
        pairing, spans = self._pairing, self._pairing.cut(item, size)
        if after == "sums":
            wanted: Sequence[Span] = pairing.sums(item)
        else:
            wanted = [span for host in pairing.wanting[item.wanted_as] for span in pairing.held(after, item, host)]
        is_ascending = after == "sums"
        for part, start, stop in spans:
            to = self._shared.setdefault((id(pairing.cover_of[item.number]), size, part), {})
            for receiver, low, high in overlapping(wanted, start, stop) if is_ascending else wanted:
                numel = min(stop, high) - max(start, low)
                if numel > 0:
                    to[receiver] = to.get(receiver, 0) + numel

    def _add_wanting(self, item: Item, after: Stage, span: Span) -> None:
        """Adds what the rank of a span of a sum sends to all hosts that want it."""
        number = self._pairing.num_wanting[item.wanted_as]
        self._keys[span.position].append(
            self._to_hosts(item, after, span, number, self._pairing.wanting[item.wanted_as])
        )

    def _add_whole(self, item: Item, stage: Stage, after: Stage, host: int) -> None:
        """Adds what a host that has the whole of an item sends of it."""
        pairing = self._pairing
        served, number = pairing.served_by(item, host), pairing.num_wanting[item.wanted_as]
        group: Hashable = number
        if len(pairing.cover_of[item.number].full) > 1:
            group = number, pairing.cover_of[item.number].number, host
        for span in pairing.dealt(item, host) if stage == "source" else pairing.cut_on(item, host):
            key = self._to_hosts(item, after, span, group, served)
            inside = [rank for rank in pairing.ranks_of[host] if rank in self._shared[key]]
            if stage == "terms" or not inside or (after == "shares" and inside == [span.position]):
                self._keys[span.position].append(key)
                continue
            for receiver, numel in self._shared[key].items():  # ranks that hold an item keep it
                if receiver not in inside:
                    self._send(span.position, receiver, numel)
            self._count_pairs(len(self._shared[key]))
        if stage == "source" and after == "target":
            self._send_whole(item, host, pairing.wanting[item.wanted_as].get(host, ()))

    def _to_hosts(self, item: Item, after: Stage, span: Span, group: Hashable, hosts: Iterable[int]) -> Hashable:
        """Key of what a span becomes at some hosts, a `group`: shares of their ranks, or a part of what these want."""
        pairing, start, stop = self._pairing, span.start, span.stop
        if after == "target":
            key: Hashable = "target", group, item.wanted_as, stop - start
            if key not in self._shared:
                ranks = (rank for host in hosts for rank in pairing.wanting[item.wanted_as][host])
                self._shared[key] = dict.fromkeys(ranks, stop - start)
            return key
        parts = {
            size: tuple(
                (part, min(stop, high) - max(start, low))
                for part, low, high in overlapping(pairing.cut(item, size), start, stop)
            )
            for size in pairing.host_sizes
        }
        key = "shares", group, tuple(parts.values())
        if key not in self._shared:
            self._shared[key] = {
                ranks[part]: numel
                for ranks in map(pairing.ranks_of.__getitem__, hosts)
                for part, numel in parts[len(ranks)]
            }
        return key
