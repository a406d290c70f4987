"""What daemons on many machines share: mirrors as packs and manifests in an object store."""
