"""Media of the rows in a batch: placement of features, and their release after the prefill."""

from collections.abc import Iterable

from worker.engine.row import BatchSequence, Row
from worker.vision.attach import Vision
from worker.vision.encoder import MediaEncoder
from worker.vision.multimodal_merge import MediaPlacement


class RowMedia:
    """Media of the rows of a batch, owned by the batch. For text models every method does nothing."""

    def __init__(self, vision: Vision | None, encoder: MediaEncoder | None) -> None:
        self._encoder = encoder
        # Whether tokens of a medium attend to each other in both directions, so that no chunk may cut a medium.
        self._keeps_whole = vision is not None and bool(vision.needs.block)

    def is_ready(self, row: Row, cached: int, *, is_first: bool = False) -> bool:
        """Whether a row has the features of all media after its cached tokens; requests missing features."""
        if not row.media:
            return True
        assert self._encoder is not None, "media are for models with a tower"
        media = [span.medium for span in row.media if span.end > cached]
        return self._encoder.is_ready(row.rid, media, is_first=is_first)

    def placement(self, row: Row, reused: int) -> MediaPlacement | None:
        """Return the media of a row, with the features of the media that are not reused."""
        if not row.media:
            return None
        assert self._encoder is not None, "media are for models with a tower"
        placement = MediaPlacement(row.media, row.positions, len(row.prompt))
        for span in row.media:
            if span.end > reused and span.medium.key not in placement.features:
                placement.features[span.medium.key] = self._encoder.held(row.rid, span.medium)
        self._encoder.keep(row.rid, placement.features)
        return placement

    def release(self, sequence: BatchSequence) -> None:
        """Free the features that the prefill of a row has passed."""
        row, placement = sequence.row, sequence.placement
        if placement is not None and placement.features:
            assert self._encoder is not None
            needed = {span.medium.key for span in row.media if span.end > sequence.prefilled}
            passed = placement.features.keys() - needed
            for key in passed:
                del placement.features[key]
            self._encoder.release(row.rid, passed)

    def forget(self, row: Row) -> None:
        """Free the features of a row."""
        if row.media:
            assert self._encoder is not None
            self._encoder.forget(row.rid)

    def longest_whole(self, row: Row) -> int:
        """Return the number of tokens of a row's longest medium that no chunk may cut; 0 without such a medium."""
        return max((span.end - span.begin for span in row.media), default=0) if self._keeps_whole else 0

    def widened(self, chunk: int, prefilling: Iterable[Row]) -> int:
        """Return `chunk`, or the length of the longest medium in prefill if that is larger and the medium may not be
        cut."""
        if not self._keeps_whole:
            return chunk
        return max((chunk, *(span.end - span.begin for row in prefilling for span in row.media)))
