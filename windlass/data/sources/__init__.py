"""Where text comes from: files, object stores, hubs; read record by record."""
