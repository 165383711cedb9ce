"""What can be wrong with a record, each kind by name. All are ``GuidanceError``; none is ever turned into a number."""

from __future__ import annotations


class GuidanceError(ValueError):
    """A record that must not be used: wrong sample, layer, version, contract, or shape. Never turned into a number."""


class CorruptRecordError(GuidanceError):
    """Bytes differ from what was written: a checksum, a reserved byte or the manifest's own rules disagree."""


class TruncatedRecordError(GuidanceError):
    """The record ends before, or goes on after, the length it declares."""


class RecordVersionError(GuidanceError):
    """Not a guidance record, or one of a format version this reader does not know."""


class FingerprintError(GuidanceError):
    """Recorded under another precision contract."""


class LayerError(GuidanceError):
    """The record does not hold the layers or sites that are asked of it."""


class ShardError(GuidanceError):
    """Shards are missing, repeated, out of order, or do not tile what they were cut from."""


class DuplicateRowError(GuidanceError):
    """Two rows claim the same (sample, position)."""


class CoverageError(GuidanceError):
    """Rows are missing between the first and the last position asked for."""


class ZeroRowError(GuidanceError):
    """A row marked valid holds nothing but zeros: a shard that was never captured."""


class TokenMismatchError(GuidanceError):
    """Recorded for other token ids than the trainer holds (a text was tokenised again between engine and trainer)."""
