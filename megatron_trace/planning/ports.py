"""Ports of a run, in disjoint ranges fixed before anything starts: no free port is looked for and released again (no torch)."""

from __future__ import annotations

from dataclasses import dataclass

RAY_PORTS = 16
"""Ray's head, object manager, node manager, metrics and client ports."""
RAY_WORKER_PORTS = 256
ENGINE_PORTS = 16
"""One engine's server, its process group's rendezvous and its spare ones for a second attempt."""
LAST_PORT = 65535


@dataclass(frozen=True)
class Ports:
    """First port of each range on every node; ``end`` is one past the last."""

    rendezvous: int
    ray: int
    ray_workers: int
    engines: int
    engines_per_node: int

    @property
    def end(self) -> int:
        return self.engines + self.engines_per_node * ENGINE_PORTS

    def engine(self, index: int) -> range:
        """Ports of the node's engine ``index``; ValueError where the node has no such engine."""
        if not 0 <= index < self.engines_per_node:
            raise ValueError(f"engine {index}: this node has engines 0..{self.engines_per_node - 1}")
        return range(self.engines + index * ENGINE_PORTS, self.engines + (index + 1) * ENGINE_PORTS)


def reserve(base_port: int, *, engines_per_node: int) -> Ports:
    """The ranges from ``base_port`` on: rendezvous, Ray, its workers, engines."""
    ray = base_port + 1
    workers = ray + RAY_PORTS
    return Ports(
        rendezvous=base_port,
        ray=ray,
        ray_workers=workers,
        engines=workers + RAY_WORKER_PORTS,
        engines_per_node=engines_per_node,
    )
