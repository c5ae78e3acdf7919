"""The wire: frames, messages, connections and the handshake's cryptography."""
