"""Keep a cache of blocks within its bound: folders that nobody has open go first, then blocks long unused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from windlass.common.locks import locked
from windlass.data.shards.blocks import COMMIT, STATE, USE, BlockFolder, punch_hole
from windlass.errors import UserError

LAYOUT = "layout.json"  # beside the blocks: what another process needs to open them
AT_ONCE = 64  # blocks that go together, so that space is not looked for at every fetch


class CacheEvictor:
    """Keeps all block folders that lie beside one another within `limit` bytes together."""

    def __init__(self, blocks: BlockFolder, limit: int) -> None:
        self.blocks, self.limit = blocks, limit
        self._others: dict[Path, BlockFolder] = {}
        (blocks.folder / LAYOUT).write_text(
            json.dumps({"sizes": dict(zip(blocks.names, blocks.sizes, strict=True)), "block": blocks.block_bytes})
        )
        if sum(blocks.sizes) > limit:
            self._require_holes()
        if limit < 2 * AT_ONCE * blocks.block_bytes and sum(blocks.sizes) > limit:
            least = 2 * AT_ONCE * blocks.block_bytes
            raise UserError(
                f"the cache of {limit:,} bytes is too small to read ahead in",
                evidence=f"{least:,} bytes is the least for data of {sum(blocks.sizes):,}",
                fix=f"data.cache_gib={least / 2**30:g}",
            )

    def _require_holes(self) -> None:
        probe = self.blocks.folder / "probe"
        try:
            with probe.open("wb") as file:
                file.write(b"x" * self.blocks.block_bytes)
                file.flush()
                punch_hole(file.fileno(), 0, self.blocks.block_bytes)
        except OSError as error:
            raise UserError(
                "the data is larger than the cache may become, and the cache's file system cannot drop parts of files",
                evidence=f"{self.blocks.folder}: {error}",
                fix=f"data.cache_gib={-(-sum(self.blocks.sizes) // 2**30)} or more, or export WINDLASS_CACHE=FOLDER",
            ) from None
        finally:
            probe.unlink(missing_ok=True)

    def make_space(self) -> None:
        """Remove blocks until one more fits."""
        if self._total() + self.blocks.block_bytes <= self.limit:
            return
        with one_at_a_time(self.blocks.folder.parent):
            while self._total() + self.blocks.block_bytes > self.limit and self._drop_oldest():
                pass

    def evict_some(self) -> bool:
        """Remove some blocks, since the disk is full before the bound is reached; False if there are none."""
        with one_at_a_time(self.blocks.folder.parent):
            self._total()
            return self._drop_oldest()

    def _drop_oldest(self) -> bool:
        if self._remove_abandoned():
            return True
        folders = [folder for folder in (self.blocks, *self._others.values()) if folder.num_bytes()]
        if not folders:
            return False
        oldest = min(folders, key=lambda folder: folder.used[folder.oldest(1)[0]])
        oldest.remove(oldest.oldest(AT_ONCE))
        return True

    def _total(self) -> int:
        for state in self.blocks.folder.parent.glob(f"*/{STATE}"):
            folder = state.parent
            if folder != self.blocks.folder and folder not in self._others:
                with suppress(OSError, ValueError, KeyError):  # it is being made, or removed
                    layout = json.loads((folder / LAYOUT).read_text())
                    self._others[folder] = BlockFolder(folder, layout["sizes"], layout["block"], using=False)
        for folder in [path for path in self._others if not (path / STATE).exists()]:
            del self._others[folder]
        return sum(folder.num_bytes() for folder in (self.blocks, *self._others.values()))

    def _remove_abandoned(self) -> bool:
        """Remove the oldest folder that no process has open."""
        for folder in sorted(self._others, key=lambda path: (path / STATE).stat().st_mtime):
            with locked(folder / USE, patience_s=0) as unused:
                if not unused:
                    continue
                (folder / STATE).unlink(missing_ok=True)
                shutil.rmtree(folder, ignore_errors=True)
                del self._others[folder]
                return True
        return False


@contextmanager
def one_at_a_time(root: Path) -> Iterator[None]:
    """One process at a time removes blocks or opens a folder of them."""
    root.mkdir(parents=True, exist_ok=True)
    with locked(root / COMMIT):
        yield
