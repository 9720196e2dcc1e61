"""Pages of the PDFs that were read last, so that each turn of a conversation does not read its PDF again."""

from collections import OrderedDict
from typing import Final

from msgspec import Struct

from gateway.media.pdf_process import PdfPages

CACHE_MAX_BYTES: Final = 64 * 1024 * 1024


class PageCacheKey(Struct, frozen=True):
    """Key of the pages of a PDF: everything that they depend on, and the API key, because keys share nothing."""

    owner: str
    digest: bytes
    has_pictures: bool
    picture_max_pixels: int


class PageCache:
    """Pages by what they depend on, the oldest use first. Used on the event loop only."""

    def __init__(self, max_bytes: int = CACHE_MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._pages: OrderedDict[PageCacheKey, PdfPages] = OrderedDict()
        self.size_bytes = 0

    def find(self, key: PageCacheKey) -> PdfPages | None:
        pages = self._pages.get(key)
        if pages is not None:
            self._pages.move_to_end(key)
        return pages

    def keep(self, key: PageCacheKey, pages: PdfPages) -> None:
        """Keep pages, and drop those that were not used for longest. Pages larger than the cache are not kept."""
        if pages.size_bytes > self._max_bytes or key in self._pages:
            return
        self._pages[key] = pages
        self.size_bytes += pages.size_bytes
        while self.size_bytes > self._max_bytes:
            _, oldest = self._pages.popitem(last=False)
            self.size_bytes -= oldest.size_bytes
