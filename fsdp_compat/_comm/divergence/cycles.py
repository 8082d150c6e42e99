"""The search for ranks that wait for each other in a circle.

A rank *lacks* what another rank waits for while it has begun it less often than the waiting rank.

A circle that the search finds is real, however old a post is. A waiting rank starts nothing. If
rank B has not yet started what A waits for, and B itself waits, then A's wait ends after B's. In a
circle of such waits no wait can be the first to end. The same holds for a chain that ends at a wait
over connections of which some rank has failed: every exchange needs that rank. A rank that computes
has no post, and a message in flight was begun; so neither a slow rank nor a slow network looks like
a circle. All this needs ranks that communicate from one thread: while several threads do,
deadlock.py does not search.

A rank that waits in a rendezvous has sent nothing yet. If a circle passes through such ranks, only
they get an error and the waits of the others go on, because a refused rank can still do what they
wait for."""

from __future__ import annotations

import dataclasses

from .status_store import Post, StatusStore
from .waits import Report


def find_cycle(store: StatusStore, own: Post) -> Report | None:
    """Return why a wait can never end, or None if it may end."""
    path: dict[int, Post] = {}  # by rank, in the order of the search
    done: set[int] = set()  # ranks that lead to no circle

    def with_path(report: Report) -> Report:
        lines = {rank: post.wait.text for rank, post in path.items()}
        return dataclasses.replace(report, lines={**report.lines, **lines})

    def search(post: Post) -> Report | None:
        wait = post.wait
        path[wait.rank] = post
        failed = None if wait.can_be_refused else store.failure_of(wait.name)
        if failed is not None:
            return with_path(failed)
        for rank in wait.peers:
            peer = path.get(rank) or (None if rank in done else store.post_of(rank))
            if peer is None or not peer.lacks(wait):
                continue
            if rank not in path:
                found = search(peer)
                if found is not None:
                    return found
                continue
            ranks = list(path)
            circle = ranks[ranks.index(rank) :]
            refused = [rank for rank in circle if path[rank].wait.can_be_refused]
            if not refused or own.wait.rank in refused:
                return with_path(Report({}))
        del path[wait.rank]
        done.add(wait.rank)
        return None

    return search(own)
