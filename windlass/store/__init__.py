"""Files in folders and object stores, through one small interface. Used by checkpoints and data alike."""

from windlass.store.interface import Entry, Store, StoreOptions, Upload
from windlass.store.opening import is_store_url, open_store

__all__ = ["Entry", "Store", "StoreOptions", "Upload", "is_store_url", "open_store"]
