"""The wire: frames, messages, streams of tensors, connections, and peers: sessions and who may come in."""
